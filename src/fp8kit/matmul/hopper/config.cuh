// Constants derived from the macros (gemm.cu has their table), and the conditions they must satisfy.
//
// The MMA computes D[M, N] = A[M, K] @ B[N, K].T with M = MMA_M and N = MMA_N. With SWAP_AB, A holds
// weights and B tokens; without, A holds tokens and B weights.

constexpr int MMA_M = 64 * WARPGROUPS, TILE_K = 128, CONSUMERS = 128 * WARPGROUPS;
constexpr int A_BYTES = MMA_M * TILE_K, B_BYTES = MMA_N * TILE_K;  // of one stage
constexpr int W_BYTES = SWAP_AB ? A_BYTES : B_BYTES, X_BYTES = SWAP_AB ? B_BYTES : A_BYTES;
constexpr int TILE_TOKENS = SWAP_AB ? MMA_N : MMA_M, TILE_WEIGHTS = SWAP_AB ? MMA_M : MMA_N;
constexpr int SCALE_BYTES = BLOCK_SCALES ? (TILE_TOKENS + 31) / 32 * 128 : 0;  // of one stage
// swizzled epilogue buffers follow the scales
constexpr int ALL_SCALE_BYTES = (TOKEN_STAGES * SCALE_BYTES + 1023) / 1024 * 1024;
constexpr int ACC = MMA_N / 2, FRAGMENTS = MMA_N / 8;  // registers of a thread; a fragment is four
// Arrivals per warpgroup that release a stage: with block scales each warp has its own reads of scales.
constexpr int RELEASES = BLOCK_SCALES ? 4 : 1;
// In-GEMM quantization fills all token stages at once, behind one barrier.
constexpr int TOKEN_BARRIERS = QUANTIZE_ROWS ? 1 : TOKEN_STAGES;
constexpr int SHARED_STAGES = QUANTIZE_ROWS ? WEIGHT_STAGES : TOKEN_STAGES;
// K steps between warpgroups, so that one multiplies while another runs its epilogue
constexpr int SKEW =
    WARPGROUPS > 1 && SHARED_STAGES > 2 * WARPGROUPS ? SHARED_STAGES / 2 / (WARPGROUPS - 1) : 0;
// split-K: fragments of a tile that one block of the cluster reduces, and bytes of a peer's partials
constexpr int OWNED_FRAGMENTS = FRAGMENTS == 1 ? 1 : ((FRAGMENTS + SPLIT_K - 1) / SPLIT_K + 1) / 2 * 2;
constexpr int PARTIAL_BYTES = OWNED_FRAGMENTS * CONSUMERS * 16;
// epilogue: lines of EPILOGUE_COLS columns, along N of the result; a vector is eight results
constexpr int LINES = SWAP_AB ? EPILOGUE_COLS : 64, LINE_VECTORS = SWAP_AB ? 8 : EPILOGUE_COLS / 8;
// Bank conflicts: lines of a multiple of eight vectors are swizzled, others padded by 16 bytes. TMA
// stores unswizzled lines without padding, where two lanes then share a bank.
constexpr bool SWIZZLED = LINE_VECTORS % 8 == 0;
constexpr int LINE_BYTES = LINE_VECTORS * 16 + (SWIZZLED || TMA_STORE ? 0 : 16);
constexpr int EPILOGUE_PARTS = MMA_N / EPILOGUE_COLS, EPILOGUE_BYTES = LINES * LINE_BYTES;
// 128x128 scale blocks that the weights of a tile lie in
constexpr int W_BLOCKS = BLOCK_SCALES && !SWAP_AB && 128 % MMA_N != 0 ? 2 : 1;
// biases of a warpgroup's part of a tile, and how many of them a thread loads
constexpr int BIASES = SWAP_AB ? 64 : MMA_N, THREAD_BIASES = (BIASES + 127) / 128;

static_assert(MMA_N == 8 || MMA_N % 16 == 0, "stmatrix stores 16 columns at once");
static_assert(MMA_N % EPILOGUE_COLS == 0, "the epilogue's parts of a tile have one size");
static_assert(CLUSTER_SYNC_EVERY == 0 || SPLIT_K == 1, "a cluster either shares weights or splits K");
static_assert(CONSUMER_REGISTERS == 0 || PRODUCER_THREADS == 128, "setmaxnreg acts on whole warpgroups");
static_assert(SHARED_STAGES >= (PIPELINED_STEPS == 1 ? 1 : 2), "MMAs in flight hold their stages");
static_assert(WEIGHT_STAGES >= SHARED_STAGES, "MMAs in flight hold their stages");
static_assert(WEIGHT_STAGES >= MAX_INFLIGHT && MAX_INFLIGHT >= WARMUP_INFLIGHT && WARMUP_INFLIGHT >= 1,
              "some weights are in flight");
static_assert(SPLIT_K == 1 || 4 % PIPELINED_STEPS == 0, "the parts of K are multiples of 4 steps");
static_assert(!TMA_STORE || (OUT_KIND != F32 && SPLIT_K == 1), "TMA stores whole tiles of 16 bits");
static_assert(W_BLOCKS == 1 || MMA_N <= 128 + (MMA_N & -MMA_N), "weights of a tile lie in three blocks");
static_assert(QUANTIZE_ROWS == 0 || (MMA_N == 8 && 4 * WARPGROUPS % QUANTIZE_ROWS == 0),
              "whole warps share a row");
