// Constants derived from the macros (grouped_gemm.cu has their table).
//
// A stage has 128 along K of tokens and of two halves of weight rows: gates and ups of the same features,
// or consecutive rows. A NARROW second product has one half, and 256 along K. With SWAP_AB the MMA's rows
// are weights, 64 of a half for each consumer warpgroup, and its columns the tokens. Without, its rows are
// tokens, 64 for each warpgroup, and its columns a half of the weights.

constexpr int TILE_K = 128, CONSUMERS = 128 * WARPGROUPS, ACC = MMA_N / 2;
constexpr int TILE_TOKENS = SWAP_AB ? MMA_N : 64 * WARPGROUPS, TOKENS = SWAP_AB ? MMA_N : 64;  // of a warpgroup
constexpr int HALF_ROWS = SWAP_AB ? 64 * WARPGROUPS : MMA_N, HALF_BYTES = HALF_ROWS * TILE_K;
constexpr int W_BYTES = 2 * HALF_BYTES, X_BYTES = TILE_TOKENS * TILE_K;
constexpr int SCALE_BYTES =
    (FIRST && X_GROUPS) || (SECOND && H_GROUPS) ? (TILE_TOKENS * 4 + 127) / 128 * 128 : 0;
constexpr int X_STAGE_BYTES = X_BYTES << NARROW, SCALE_STAGE_BYTES = SCALE_BYTES << NARROW;
constexpr int STAGE_BYTES = W_BYTES + X_STAGE_BYTES + SCALE_STAGE_BYTES;
// consumers take registers from a warpgroup of producers
constexpr bool MOVE_REGISTERS = WARPGROUPS == 2 || GATHERS;
constexpr int PRODUCER_THREADS = MOVE_REGISTERS ? 128 : 64, TOKEN_WARPS = GATHERS ? 3 : 1;  // warps that load tokens
constexpr int PRODUCER_REGISTERS = GATHERS || (FIRST && SECOND) ? 40 : 24;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 1 ? 208 : PRODUCER_REGISTERS > 24 ? 232 : 240;  // no more than producers give
// tiles of few tokens take the same time, so blocks take them in turn, not from a counter
constexpr bool TAKES_TURNS = WARPGROUPS == 1;
// partial sums: with two, one half is promoted while the other is multiplied; with four, two steps are
// in flight
constexpr int PARTIALS = !SWAP_AB || MMA_N > 128 ? 1 : MMA_N <= 32 ? 4 : 2, LAST = PARTIALS - 1;

// Tokens by gates and ups, activated and quantized in groups.
struct FirstProduct {
  static constexpr bool ACTIVATED = true, TOKEN_GROUPS = X_GROUPS, GATHERED = GATHERS;
  static constexpr int BIAS_KIND = BIAS_KIND_13, TILE_FEATURES = 128, HALVES = 2;
  // threads that copy lines together, how many, and of how many vectors of 16 bytes each is
  static constexpr int COPIERS = SWAP_AB ? 128 : 32, LINES = SWAP_AB ? EPILOGUE_TOKENS : 16, VECTORS = SWAP_AB ? 4 : 8;
};

// The result of the first product by the down weights, each row stored to the row of its pair.
struct SecondProduct {
  static constexpr bool ACTIVATED = false, TOKEN_GROUPS = H_GROUPS, GATHERED = false;
  static constexpr int BIAS_KIND = BIAS_KIND_2, HALVES = NARROW ? 1 : 2, TILE_FEATURES = HALVES * HALF_ROWS;
  static constexpr int COPIERS = SWAP_AB ? 128 : 32, LINES = SWAP_AB && MMA_N < 16 ? MMA_N : 16, VECTORS = 8;
};

// Lines of results are padded against bank conflicts.
template <typename Product>
constexpr int LINE_BYTES = Product::VECTORS * 16 + 16;
template <typename Product>
constexpr int BUFFER_BYTES = Product::LINES * LINE_BYTES<Product>;  // of threads that copy together
constexpr int FIRST_BYTES = FIRST * 128 / FirstProduct::COPIERS * BUFFER_BYTES<FirstProduct>;
constexpr int SECOND_BYTES = SECOND * (SWAP_AB ? 2 : 4) * BUFFER_BYTES<SecondProduct>;
constexpr int EPILOGUE_BYTES = FIRST_BYTES > SECOND_BYTES ? FIRST_BYTES : SECOND_BYTES;  // of a warpgroup
static_assert(STAGES * STAGE_BYTES + WARPGROUPS * EPILOGUE_BYTES == SMEM_BYTES, "as the host counts");
static_assert(TOKENS % EPILOGUE_TOKENS == 0, "whole turns");

static_assert(MMA_N % 8 == 0 && MMA_N <= CONSUMERS, "a thread scales one token");
static_assert(!FIRST || CLUSTER * HALF_ROWS == 128, "a cluster has the 128 features of a group");
static_assert(!NARROW || (SECOND && PARTIALS > 1), "more tokens would be loaded more often than weights");
