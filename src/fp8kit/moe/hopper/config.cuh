// Constants derived from the macros, whose table stands in grouped_gemm.cu.
//
// A stage has 128 along K of two halves of weight rows, gates and ups of the same features or rows that
// follow one another, and of tokens. With SWAP_AB the MMA's rows are weights, 64 of a half for each
// consumer warpgroup, and its columns the tokens. Without, its rows are tokens, 64 for each warpgroup,
// and its columns a half of the weights.

constexpr int TILE_K = 128, CONSUMERS = 128 * WARPGROUPS, ACC = MMA_N / 2;
constexpr int TILE_TOKENS = SWAP_AB ? MMA_N : 64 * WARPGROUPS, TOKENS = SWAP_AB ? MMA_N : 64;  // of a warpgroup
constexpr int HALF_ROWS = SWAP_AB ? 64 * WARPGROUPS : MMA_N, HALF_BYTES = HALF_ROWS * TILE_K;
constexpr int W_BYTES = 2 * HALF_BYTES, X_BYTES = TILE_TOKENS * TILE_K;  // of one stage
constexpr int SCALE_BYTES = TOKEN_GROUPS ? (TILE_TOKENS * 4 + 127) / 128 * 128 : 0;
// two warpgroups of consumers take registers from one of producers
constexpr bool MOVE_REGISTERS = WARPGROUPS == 2;
constexpr int PRODUCER_THREADS = MOVE_REGISTERS ? 128 : 64;
// partial sums: with two, the half that is promoted is not the half that is multiplied
constexpr int PARTIALS = SWAP_AB ? 2 : 1, LAST = PARTIALS - 1;
constexpr int TILE_FEATURES = ACTIVATED ? 128 : 2 * HALF_ROWS;  // of a cluster
// epilogue: tokens that move at once, in lines of results that are padded against bank conflicts
constexpr int EPILOGUE_TOKENS = TOKENS < 64 ? TOKENS : 64;
constexpr int LINE_FEATURES = SWAP_AB || !ACTIVATED ? 64 : 128, LINE_VECTORS = LINE_FEATURES * (ACTIVATED ? 1 : 2) / 16;
constexpr int LINE_BYTES = LINE_VECTORS * 16 + 16, EPILOGUE_BYTES = EPILOGUE_TOKENS * LINE_BYTES;

static_assert(MMA_N % 8 == 0 && MMA_N <= 128, "a thread scales one token");
static_assert(!ACTIVATED || CLUSTER * HALF_ROWS == 128, "a cluster has the 128 features of a group");
static_assert(ACTIVATED || CLUSTER == 1, "only groups are shared");
