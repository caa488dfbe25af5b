// y[M, N] = (x[M, K] @ w[N, K].T) * scales + bias on Hopper.
//
// A tile has 64 rows per consumer warpgroup and COLS columns. Few tokens are its columns and weights
// its rows, so that nothing is wasted; for many it may be the other way round (TOKEN_ROWS), where the
// weights then divide better, or with block scales, because a thread then needs few scales per step
// instead of two per eight columns.
//
// One warp streams weights and one streams tokens through rings in shared memory. Weights start
// before the kernel that quantizes x has ended, with at most START tiles on their way until the first
// tokens are here and WINDOW from then on: more requests would only stand in the way of the tokens'
// and the quantizer's. Consumer warpgroups multiply a tile of 128 along K, then add it to fp32
// registers, because the tensor core keeps only about 14 bits of a sum; in a RUN of several, the next
// product is under way meanwhile. A block takes tile after tile, and its warpgroups work SKEW steps
// apart, so that one multiplies while another writes. The tiles that are too few for all blocks are
// split along K by the blocks of a cluster: each sends its parts to the blocks that own them, which
// add in a fixed order, so bits do not depend on timing.
//
// Up to four tokens may come as VALUES in 16 bits: every block then quantizes what it multiplies, which
// saves a kernel and the wait for it.
//
// Nothing is __restrict__: what the kernels ahead still write is not read-only while this one runs.
//
// Set by the host: COLS, GROUPS, RUN, STAGES, X_STAGES, START, WINDOW, SPLIT, RESIDENT, MEETING,
// PRODUCERS, STARTED, REGISTERS, PRODUCER_REGISTERS, TOKEN_ROWS, BLOCK_SCALES, STREAMED, STORED,
// PASS, HELD, OUT_KIND, BIAS_KIND, VALUES, VECTORS, and those of encode.cuh.

struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int ROWS = 64 * GROUPS, TILE_K = 128, CONSUMERS = 128 * GROUPS;
constexpr int ROW_BYTES = ROWS * TILE_K, COL_BYTES = COLS * TILE_K;
constexpr int W_BYTES = TOKEN_ROWS ? COL_BYTES : ROW_BYTES, X_BYTES = TOKEN_ROWS ? ROW_BYTES : COL_BYTES;
constexpr int TOKENS = TOKEN_ROWS ? ROWS : COLS, WEIGHTS = TOKEN_ROWS ? COLS : ROWS;
constexpr int SCALE_BYTES = BLOCK_SCALES ? (TOKENS + 31) / 32 * 128 : 0;  // of one stage
constexpr int ALL_SCALE_BYTES = (X_STAGES * SCALE_BYTES + 1023) / 1024 * 1024;  // swizzled results follow
constexpr int ACC = COLS / 2, FRAGMENTS = COLS / 8;  // a fragment: four results of a thread
constexpr int RELEASES = BLOCK_SCALES ? 4 : 1;  // of a slot by a warpgroup: each warp reads scales itself
static_assert(MEETING == 0 || SPLIT == 1, "the blocks of a cluster either meet or split K");
constexpr int RING = VALUES ? STAGES : X_STAGES;  // steps that warpgroups may be apart
constexpr int SKEW = GROUPS > 1 && RING > 2 * GROUPS ? RING / 2 / (GROUPS - 1) : 0;
// fragments that one block of a cluster owns
constexpr int SHARE = FRAGMENTS == 1 ? 1 : ((FRAGMENTS + SPLIT - 1) / SPLIT + 1) / 2 * 2;
constexpr int PART_BYTES = SHARE * CONSUMERS * 16;
static_assert(COLS == 8 || COLS % 16 == 0, "stmatrix stores 16 columns at once");
static_assert(REGISTERS == 0 || PRODUCERS == 128, "setmaxnreg acts on whole warpgroups");
static_assert(RING >= (RUN == 1 ? 1 : 2) && STAGES >= RING, "products in flight hold their slots");
static_assert(STAGES >= WINDOW && WINDOW >= START && START >= 1, "some weights are on their way");
static_assert(SPLIT == 1 || 4 % RUN == 0, "the parts of K are multiples of 4 tiles");
static_assert(COLS % PASS == 0, "parts of a tile are alike");
// lines of results along N in the PASS columns that leave at once
constexpr int LINES = TOKEN_ROWS ? 64 : PASS, EIGHTHS = TOKEN_ROWS ? PASS / 8 : 8;
// Bank conflicts are avoided by permuting eight results at a time, where lines have a multiple of eight
// of them, otherwise by 16 bytes more than results need; where the accelerator stores lines of other
// lengths there are no gaps, and two lanes share a bank.
constexpr bool PERMUTED = EIGHTHS % 8 == 0;
constexpr int LINE = EIGHTHS * 16 + (PERMUTED || STORED ? 0 : 16);  // bytes
constexpr int PASSES = COLS / PASS, PASS_BYTES = LINES * LINE;
static_assert(!STORED || (OUT_KIND != F32 && SPLIT == 1), "whole tiles of 16 bits are stored");
// blocks of scales that the weights of a tile lie in
constexpr int W_BLOCKS = BLOCK_SCALES && TOKEN_ROWS && 128 % COLS != 0 ? 2 : 1;
static_assert(W_BLOCKS == 1 || COLS <= 128 + (COLS & -COLS), "a tile's weights may lie in three blocks");
// biases of a tile that a warpgroup needs, and how many of them a thread holds
constexpr int BIASES = TOKEN_ROWS ? COLS : 64, HELD_BIASES = (BIASES + 127) / 128;
constexpr int X_SLOTS = VALUES ? 1 : X_STAGES;  // values are quantized into all of the ring at once
static_assert(VALUES == 0 || (COLS == 8 && 4 * GROUPS % VALUES == 0), "whole warps share a row");

__device__ __forceinline__ bool passed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// True for one lane of a warp that runs together. What only depends on the block stays in uniform
// registers that way, which the loads want; `lane == 0` costs a loop around each of them.
__device__ __forceinline__ bool elected() {
  u32 mine;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(mine));
  return mine;
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void release(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Hands back a slot that was read from, where `read` is made of all that was read. An arrival overtakes
// reads that wait in line behind the stores of other warps, whatever the order of the program, unless
// it depends on them: here by two predicates that the compiler cannot know. One read serves the lanes
// of a warp that runs together, so it is enough that one of them depends on it.
__device__ __forceinline__ void release_read(u32 barrier, u32 read) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0xffffffff;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "@!p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier), "r"(read)
      : "memory");
}

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int col, int row, u32 barrier,
                                     u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(col), "r"(row),
      "l"(policy) : "memory");
}

// Stores a box of results; columns count bytes. The thread that asks has to wait until they are read.
__device__ __forceinline__ void store(const TensorMap* map, int col, int row, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(from), "r"(col), "r"(row) : "memory");
}

__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Of a K-major tile of 128 bytes a row in the 128-byte swizzle; 8 rows are 1024 bytes apart. The low
// word counts addresses in 16 bytes, so that tiles further on in shared memory are found by adding.
__device__ __forceinline__ u32 place(u32 address) { return ((address >> 4) & 0x3fff) | (1u << 16); }
__device__ __forceinline__ u64 descriptor(u32 low) { return (64ull << 32) | (1ull << 62) | low; }

__device__ __forceinline__ void multiply(float (&d)[ACC], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, @ADD@, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n@COLS@k32.f32.e4m3.e4m3 {@D@}, @A@, @B@, add, 1, 1;\n}"
      : @OUT@ : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ void pin(float (&d)[ACC]) {
#pragma unroll
  for (int i = 0; i < ACC; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int LEFT>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void group_barrier(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
}

__device__ __forceinline__ float read_bias(const void* bias, int row) {
  if (BIAS_KIND == F32) return ((const float*)bias)[row];
  u16 bits = ((const u16*)bias)[row];
  if (BIAS_KIND == BF16) return __uint_as_float((u32)bits << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ u32 narrow(float low, float high) {
  u32 bits;
  if (OUT_KIND == BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

struct Problem {
  const float* row_scale;  // of the tile's rows, as many as there are tokens or weight rows
  const float* col_scale;
  const void* bias;  // [N] or null
  void* y;           // [M, N]
  int m, n, row_stride, col_stride;
};

// Scales and bias of a tile, on their way while it is multiplied. A bias may have 16 bits, which
// asynchronous copies do not move one by one: each thread holds some of it until the tile is done.
struct Scales {
  float row[ROWS], col[GROUPS][COLS], bias[GROUPS][BIASES];

  __device__ static void hold(const Problem& p, float (&held)[HELD_BIASES], int n0) {
    const int thread = threadIdx.x % 128, first = n0 + (TOKEN_ROWS ? 0 : threadIdx.x / 128 * 64);
#pragma unroll
    for (int i = 0; i < HELD_BIASES; i++)
      if (p.bias && thread + i * 128 < BIASES)
        held[i] = read_bias(p.bias, min(first + thread + i * 128, p.n - 1));
  }
  // To be seen by the warpgroup after its next barrier.
  __device__ void arrive(const Problem& p, const float (&held)[HELD_BIASES]) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < HELD_BIASES; i++)
      if (p.bias && thread + i * 128 < BIASES) bias[threadIdx.x / 128][thread + i * 128] = held[i];
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
  __device__ void fetch(const Problem& p, int row0, int col0) {
    if (BLOCK_SCALES) return;
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int rows = TOKEN_ROWS ? p.m : p.n, cols = TOKEN_ROWS ? p.n : p.m;
    auto copy = [](float* to, const float* from) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared(to)), "l"(from)
                   : "memory");
    };
    for (int i = thread; i < COLS && !VALUES; i += 128)
      copy(&col[group][i], p.col_scale + (long long)min(col0 + i, cols - 1) * p.col_stride);
    if (thread < 64) {
      const int i = group * 64 + thread;
      copy(&row[i], p.row_scale + (long long)min(row0 + i, rows - 1) * p.row_stride);
    }
  }
};

// A place in a ring, and the parity of the barrier's phase that fills it.
template <int STAGES_>
struct Slot {
  int at = 0;
  u32 parity = 0;

  __device__ void advance() {
    if (++at == STAGES_) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Barriers of a ring, by their addresses.
struct Barriers {
  u32 first;

  // opaque, so that it stays in a register: the compiler would read the block's window in every step
  __device__ explicit Barriers(const u64* barriers) {
    asm volatile("mov.u32 %0, %1;" : "=r"(first) : "r"(shared(barriers)));
  }
  __device__ explicit Barriers(u32 address) : first(address) {}
  __device__ Barriers after(int count) const { return Barriers(first + count * 8); }
  __device__ u32 operator[](int slot) const { return first + slot * 8; }
};

// The two blocks of a cluster that does not split K, while both have a tile of the same weights: loads
// that are asked for together reach the cache as one. They drift apart unless they meet now and then.
struct Partner {
  u32 here, there, parity = 0;

  __device__ explicit Partner(const u64* barrier) : here(shared(barrier)) {
    asm("{\n.reg .b32 other;\nmov.u32 other, %%cluster_ctarank;\nxor.b32 other, other, 1;\n"
        "mapa.shared::cluster.u32 %0, %1, other;\n}" : "=r"(there) : "r"(here));
  }
  __device__ void meet() {
    if (elected()) {
      release(here);
      asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
    }
    wait(here, parity);
    parity ^= 1;
  }
};

// How tiles follow one another: all weights for `span` tiles of tokens, then for the next ones, and
// `full` rounds in which every block has a tile of its own. Divisions would delay the first load.
struct Order {
  int span;
  u32 inverse;  // 2^32 / span, rounded up: exact while dividend * span < 2^32
  int full;
};

// What a block does, round by round: tiles of its own while there are enough for all, at last one
// that its cluster splits along K.
struct Walk {
  Order order;
  int rank, w_tiles, t_tiles, steps;  // steps: of 128 along K
  int left, parted;  // tiles after the rounds of whole ones, whether they are split
  int round = -1, band = 0, n0, t0, first, count;  // the present tile: its place, first step and steps

  __device__ Walk(const Order& order, int m, int n, int k, int rank) : order(order), rank(rank) {
    const int blocks = gridDim.x;
    w_tiles = (n + WEIGHTS - 1) / WEIGHTS;
    t_tiles = STREAMED ? 1 : (m + TOKENS - 1) / TOKENS;
    steps = (k + TILE_K - 1) / TILE_K;
    left = w_tiles * t_tiles - order.full * blocks;
    parted = SPLIT > 1 && left > 0 && left <= blocks / SPLIT;
    next();
  }
  __device__ int rounds() const { return order.full + (left > 0); }
  __device__ bool split() const { return parted && round == order.full; }
  __device__ bool more() const { return round < rounds(); }
  // Steps beyond K read zeros and keep a RUN whole; the cut of K does not depend on RUN.
  __device__ void next() {
    round++;
    const int tile = round * gridDim.x + (split() ? blockIdx.x / SPLIT : blockIdx.x);
    if (tile >= w_tiles * t_tiles) {  // none is left for this block
      round = rounds();
      return;
    }
    while (!STREAMED && tile >= (band + 1) * order.span * w_tiles) band++;
    const int inside = tile - band * order.span * w_tiles, width = t_tiles - band * order.span;
    const int of_w = STREAMED              ? tile
                     : width >= order.span ? (int)__umulhi(inside, order.inverse)
                                           : inside / width;
    n0 = of_w * WEIGHTS;
    t0 = STREAMED ? 0 : (band * order.span + inside - of_w * min(width, order.span)) * TOKENS;
    const int part = split() ? ((steps + SPLIT - 1) / SPLIT + 3) / 4 * 4 : steps;
    first = split() ? rank * part : 0;
    count = (max(0, min(part, steps - first)) + RUN - 1) / RUN * RUN;
  }
};

// Result i of a thread: column i / 4 * 8 + q * 2 + i % 2, row i % 4 / 2 * 8 + g of its warp's 16.
__device__ __forceinline__ void scale_tile(const Problem& p, float (&acc)[ACC], const Scales& scales) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int row_g = threadIdx.x / 32 * 16 + g;
  const float* const bias = scales.bias[group];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float row_scale = BLOCK_SCALES ? 1.0f : scales.row[row_g + half * 8];
    const float row_bias = p.bias && !TOKEN_ROWS ? bias[row_g % 64 + half * 8] : 0.0f;
#pragma unroll
    for (int i = half * 2; i < ACC; i += 4)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int col = i / 4 * 8 + q * 2 + j;
        const float x_s = TOKEN_ROWS ? row_scale : scales.col[group][col];
        const float w_s = TOKEN_ROWS ? scales.col[group][col] : row_scale;
        const float added = !p.bias ? 0.0f : TOKEN_ROWS ? bias[col] : row_bias;
        // roundings are written down: bits are to be the same in every cut
        if (BLOCK_SCALES)
          acc[i + j] = p.bias ? acc[i + j] + added : acc[i + j];
        else
          acc[i + j] = p.bias ? __fmaf_rn(__fmul_rn(acc[i + j], x_s), w_s, added)
                              : __fmul_rn(__fmul_rn(acc[i + j], x_s), w_s);
      }
  }
}

__device__ __forceinline__ int place_of_eight(int line, int eighth) {
  return line * LINE + (PERMUTED ? eighth ^ line % 8 : eighth) * 16;
}

__device__ __forceinline__ bool owned(int rank, int col) {
  return SPLIT == 1 || rank < 0 || col / 8 / SHARE == rank;
}

// Puts PASS columns of a warpgroup's results into shared memory: as they lie, or transposed on the way.
__device__ __forceinline__ void stage_results(const float (&acc)[ACC], u8* out, int rank, int from) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
  for (int i = 0; i < PASS; i += 16) {
    const float* v = acc + (from + i) / 2;
    if (!owned(rank, from + i)) continue;
    const u32 to = shared(out) + (TOKEN_ROWS ? place_of_eight(warp * 16 + lane % 16, i / 8 + lane / 16)
                                             : place_of_eight(i + matrix / 2 * 8 + lane % 8,
                                                              warp * 2 + matrix % 2));
    if (COLS == 8)
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
                   "r"(narrow(v[0], v[1])), "r"(narrow(v[2], v[3])) : "memory");
    else if (TOKEN_ROWS)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "r"(narrow(v[0], v[1])), "r"(narrow(v[2], v[3])),
                   "r"(narrow(v[4], v[5])), "r"(narrow(v[6], v[7])) : "memory");
    else
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "r"(narrow(v[0], v[1])), "r"(narrow(v[2], v[3])),
                   "r"(narrow(v[4], v[5])), "r"(narrow(v[6], v[7])) : "memory");
  }
}

// Copies them to global memory, eight results of a token along N at a time. Place (n0, t0) is that of
// the warpgroup's first result.
__device__ __forceinline__ void copy_results(const Problem& p, const u8* out, int rank, int from,
                                             int n0, int t0) {
  const int thread = threadIdx.x % 128;
  auto eight = [&](int i, int& left) {  // where it belongs, as many of its results as `left` exist
    const int line = i / EIGHTHS, eighth = i % EIGHTHS * 8;
    const int token = t0 + (TOKEN_ROWS ? 0 : from) + line, at = n0 + (TOKEN_ROWS ? from : 0) + eighth;
    left = line < LINES && token < p.m && owned(rank, from + (TOKEN_ROWS ? eighth : line)) ? p.n - at : 0;
    return (u16*)p.y + (long long)token * p.n + at;
  };
  auto staged = [&](int i) { return (const u16*)(out + place_of_eight(i / EIGHTHS, i % EIGHTHS)); };
  constexpr int ALL = LINES * EIGHTHS, COPIES = (ALL + 127) / 128;
  if (p.n % 8 == 0) {
    uint4 eights[COPIES];  // loads do not wait for stores
#pragma unroll
    for (int copy = 0; copy < COPIES; copy++)
      if (thread + copy * 128 < ALL) eights[copy] = *(const uint4*)staged(thread + copy * 128);
#pragma unroll
    for (int copy = 0; copy < COPIES; copy++) {
      int left;
      u16* const to_y = eight(thread + copy * 128, left);
      if (left > 0) *(uint4*)to_y = eights[copy];
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < ALL; i += 128) {
      int left;
      u16* const to_y = eight(i, left);
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < left) to_y[j] = staged(i)[j];
    }
  }
}

// Writes the fragments that this block owns, all if its rank is -1. With STORED the tensor memory
// accelerator does, and leaves out what lies beyond M and N. It reads the last HELD parts from shared
// memory while the next tile is multiplied; those before have to be read first.
__device__ __forceinline__ void write_tile(const Problem& p, const TensorMap* y_map,
                                           const float (&acc)[ACC], u8* out, int warps, int rank, int n0,
                                           int t0) {
  const int group = warps / 4, warp = warps % 4, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  (TOKEN_ROWS ? t0 : n0) += group * 64;
  if (OUT_KIND == F32) {
#pragma unroll
    for (int i = 0; i < ACC; i++) {
      const int col = i / 4 * 8 + q * 2 + i % 2, row = warp * 16 + i % 4 / 2 * 8 + g;
      const int token = t0 + (TOKEN_ROWS ? row : col), at = n0 + (TOKEN_ROWS ? col : row);
      if (owned(rank, col) && token < p.m && at < p.n)
        ((float*)p.y)[(long long)token * p.n + at] = acc[i];
    }
    group_barrier(group);
  } else if (STORED) {
#pragma unroll
    for (int first = 0; first < PASSES; first += HELD) {
      if (first > 0) {
        if (warp == 0 && elected()) wait_stores_read();
        group_barrier(group);
      }
#pragma unroll
      for (int pass = first; pass < PASSES && pass < first + HELD; pass++)
        stage_results(acc, out + (pass - first) * PASS_BYTES, rank, pass * PASS);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      group_barrier(group);
      if (warp == 0 && elected()) {
#pragma unroll
        for (int pass = first; pass < PASSES && pass < first + HELD; pass++)
          store(y_map, (n0 + (TOKEN_ROWS ? pass * PASS : 0)) * 2, t0 + (TOKEN_ROWS ? 0 : pass * PASS),
                shared(out) + (pass - first) * PASS_BYTES);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
  } else {
#pragma unroll
    for (int from = 0; from < COLS; from += PASS) {
      stage_results(acc, out, rank, from);
      group_barrier(group);
      copy_results(p, out, rank, from, n0, t0);
      if (from + PASS < COLS) group_barrier(group);  // the next tile has barriers before it stores
    }
  }
}

// Sends every block of the cluster its fragments of this block's part, then adds what arrives.
__device__ __forceinline__ void add_parts(float (&acc)[ACC], u32 parts, u32 arrived, int rank) {
  const u32 mine = threadIdx.x * 16;
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all barriers have been set up
#pragma unroll
  for (int owner = 0; owner < SPLIT; owner++) {
    if (owner == rank) continue;
    const u32 to = in_block(parts + (rank - (rank > owner)) * PART_BYTES + mine, owner);
    const u32 barrier = in_block(arrived, owner);
#pragma unroll
    for (int f = owner * SHARE; f < FRAGMENTS && f < (owner + 1) * SHARE; f++)
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], "
          "{%1, %2, %3, %4}, [%5];" ::"r"(to + (f - owner * SHARE) * CONSUMERS * 16),
          "f"(acc[4 * f]), "f"(acc[4 * f + 1]), "f"(acc[4 * f + 2]), "f"(acc[4 * f + 3]),
          "r"(barrier) : "memory");
  }
  if (rank * SHARE >= FRAGMENTS) return;
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n}" ::"r"(arrived) : "memory");
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    if (f / SHARE != rank) continue;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int part = 0; part < SPLIT; part++) {
      float v[4] = {acc[4 * f], acc[4 * f + 1], acc[4 * f + 2], acc[4 * f + 3]};
      if (part != rank)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                     : "r"(parts + (part - (part > rank)) * PART_BYTES +
                           f % SHARE * CONSUMERS * 16 + mine));
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i] = part == 0 ? v[i] : sum[i] + v[i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) acc[4 * f + i] = sum[i];
  }
}

struct Values {
  const u8* x;  // [M, K]
  long long row_bytes;
  int m, k;
  float min_scale;
};

// Quantizes the tokens into tiles of which the first is `from` along K; a row belongs to as many warps
// as there are for each.
__device__ __forceinline__ void quantize_values(const Values& v, u32 tiles, u32 tile_scales,
                                                Scales& scales, int from) {
  constexpr int WARPS = 4 * GROUPS / (VALUES ? VALUES : 1), STEP = WARPS * 32;
  __shared__ u32 maxima[4 * GROUPS];
  const int warp = threadIdx.x / 32, row = warp / WARPS, first = threadIdx.x % STEP;
  const int vectors = row < v.m ? v.k / EACH : 0;
  const int begin = from * TILE_K / EACH, end = begin + X_STAGES * TILE_K / EACH;
  // whether a warp multiplies none of its vectors: they belong to other blocks of the cluster
  auto elsewhere = [&](int at) {
    const int of_warp = at - threadIdx.x % 32;
    return SPLIT > 1 && (of_warp + 32 <= begin || of_warp >= end);
  };
  uint4 held[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
    held[i] = first + i * STEP < vectors && !(BLOCK_SCALES && elsewhere(first + i * STEP))
                  ? ((const uint4*)(v.x + row * v.row_bytes))[first + i * STEP]
                  : make_uint4(0, 0, 0, 0);
  float scale = 0, reciprocal = 0;
  if (!BLOCK_SCALES) {
    u32 magnitude = __reduce_max_sync(~0u, largest(held));
    if (threadIdx.x % 32 == 0) maxima[warp] = magnitude;
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
    for (int i = 0; i < WARPS; i++) magnitude = max(magnitude, maxima[row * WARPS + i]);
    scale = scale_of(magnitude, v.min_scale);
    reciprocal = __frcp_rn(scale);
    if (first < GROUPS) scales.col[first][row] = scale;
  }
  auto store = [&](int at, u32 low, u32 high) {  // 8 codes
    const int byte = at % (TILE_K / EACH) * EACH, step = at / (TILE_K / EACH) - from;
    const u32 to = tiles + step * X_BYTES + row * TILE_K + (byte / 16 ^ row) * 16 + byte % 16;
    if (at >= begin && at < end)
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
  };
  auto store_scale = [&](int at, float value) {
    const int step = at / (TILE_K / EACH) - from;
    if (at % (TILE_K / EACH) == 0 && at >= begin && at < end)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(tile_scales + step * SCALE_BYTES + row * 4),
                   "f"(value) : "memory");
  };
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = first + i * STEP;
    if (elsewhere(at)) continue;
    if (BLOCK_SCALES) {  // of the 16 lanes that hold a group
      u32 magnitude = largest((const uint4(&)[1])held[i]);
#pragma unroll
      for (int other = 1; other < TILE_K / EACH; other *= 2)
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, other));
      scale = scale_of(magnitude, v.min_scale);
      reciprocal = __frcp_rn(scale);
      if (at < vectors) store_scale(at, scale);
    }
    if (at < vectors)
      store(at, encode(held[i], 0, scale, reciprocal), encode(held[i], 1, scale, reciprocal));
  }
  for (int at = vectors + first; at < end; at += STEP) {
    store(at, 0, 0);
    if (BLOCK_SCALES) store_scale(at, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what was stored
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

// Registers that are handed on later have to be counted: a block gets what its threads are started
// with. Bounds of more threads than there are would only give 128 or 168 each.
#if STARTED > 0
#define REGISTER_LIMIT __maxnreg__(STARTED)
#else
#define REGISTER_LIMIT __launch_bounds__(CONSUMERS + PRODUCERS, RESIDENT)
#endif

extern "C" __global__ void REGISTER_LIMIT hopper_gemm(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap x_scale_map, const __grid_constant__ TensorMap y_map,
    const float* x_scale, const float* w_scale, const void* bias, void* y, int m, int n, int k,
    int x_stride, int w_stride, int span, u32 inverse, int full, const u8* values, long long value_bytes,
    float min_scale) {
  extern __shared__ __align__(1024) u8 base[];  // where a pattern of the swizzle begins
  __shared__ alignas(8) u64 barriers[2 * (STAGES + X_SLOTS)];
  const Barriers w_full(barriers), w_empty = w_full.after(STAGES);
  const Barriers x_full = w_empty.after(STAGES), x_empty = x_full.after(X_SLOTS);
  __shared__ alignas(8) u64 arrived, together;
  __shared__ Scales scales;
  const u32 w_ring = shared(base), x_ring = w_ring + STAGES * W_BYTES;
  const u32 scale_ring = x_ring + X_STAGES * X_BYTES;
  u8* const after = base + STAGES * W_BYTES + X_STAGES * X_BYTES + ALL_SCALE_BYTES;  // parts, results
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // known as uniform
  int rank = 0;
  if (SPLIT > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const Problem p = {TOKEN_ROWS ? x_scale : w_scale, TOKEN_ROWS ? w_scale : x_scale, bias, y, m, n,
                     TOKEN_ROWS ? x_stride : w_stride, TOKEN_ROWS ? w_stride : x_stride};
  Walk walk({span, inverse, full}, m, n, k, rank);  // before the wait for the kernel ahead

  if (threadIdx.x == 0) {
    auto init = [](u32 barrier, int arrivals) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
    };
    for (int s = 0; s < STAGES; s++) {
      init(w_full[s], 1);
      init(w_empty[s], RELEASES * GROUPS);
    }
    for (int s = 0; s < X_SLOTS; s++) {
      init(x_full[s], 1);
      init(x_empty[s], RELEASES * GROUPS);
    }
    init(shared(&arrived), 1);
    if (MEETING > 0) init(shared(&together), 2);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (SPLIT > 1)
      expect(shared(&arrived),
             (SPLIT - 1) * max(0, min(SHARE, FRAGMENTS - rank * SHARE)) * CONSUMERS * 16);
  }
  __syncthreads();
  const bool meeting = MEETING > 0 && walk.order.full > 1;
  if (SPLIT > 1 || meeting) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  if (meeting) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // both are set up

  if (warp >= 4 * GROUPS) {
    if (REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    const u64 once = 0x12F0000000000000ull, keep = 0x14F0000000000000ull;  // L2 evict first, last
    if (warp == 4 * GROUPS) {
      if (elected()) prefetch(&w_map);
      Partner partner(&together);
      Slot<STAGES> next, oldest;
      bool tokens = VALUES;  // whether the first ones are here
      for (int asked = 0; walk.more(); walk.next())
#pragma unroll 1
        for (int c = 0; c < walk.count; c++) {
          if (meeting && walk.round < walk.order.full && c % max(MEETING, 1) == MEETING - 1)
            partner.meet();
          wait(w_empty[next.at], next.parity ^ 1);
          // may be missed for a round of the ring, which only keeps START for so long
          if (START < STAGES && !tokens) tokens = passed(x_full[0], 0);
          if (START < STAGES && ++asked > (tokens ? WINDOW : START)) {
            wait(w_full[oldest.at], oldest.parity);
            oldest.advance();
            asked--;
          }
          if (elected()) {
            expect(w_full[next.at], W_BYTES);
            load(w_ring + next.at * W_BYTES, &w_map, (walk.first + c) * TILE_K, walk.n0,
                 w_full[next.at], STREAMED ? once : keep);
          }
          next.advance();
        }
    } else if (warp == 4 * GROUPS + 1) {
      if (!VALUES && elected()) {
        prefetch(&x_map);
        if (BLOCK_SCALES) prefetch(&x_scale_map);
      }
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
      Slot<X_STAGES> next;
      for (; walk.more() && !VALUES; walk.next())
#pragma unroll 1
        for (int c = 0; c < walk.count; c++) {
          wait(x_empty[next.at], next.parity ^ 1);
          if (elected()) {
            const u32 full = x_full[next.at];
            expect(full, X_BYTES + (BLOCK_SCALES ? TOKENS * 4 : 0));
            load(x_ring + next.at * X_BYTES, &x_map, (walk.first + c) * TILE_K, walk.t0, full, keep);
            if (BLOCK_SCALES)
              load(scale_ring + next.at * SCALE_BYTES, &x_scale_map, walk.t0, walk.first + c, full, keep);
          }
          next.advance();
        }
    }
    return;
  }

  if (REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int group = warp / 4;
  u8* const out = after + (SPLIT - 1) * PART_BYTES + group * HELD * PASS_BYTES;
  const u32 w_tiles = place(w_ring) + (TOKEN_ROWS ? 0 : group * (64 * TILE_K / 16));
  const u32 x_tiles = place(x_ring) + (TOKEN_ROWS ? group * (64 * TILE_K / 16) : 0);
  float acc[ACC], product[RUN == 1 ? 1 : 2][ACC];
  Slot<STAGES> w, w_done;  // the next to multiply, the next to add
  Slot<X_STAGES> x, x_done;
  const int held = full == 0 && walk.split() ? walk.first : 0;  // the first step of the values
  if (VALUES)
    quantize_values({values, value_bytes, m, k, min_scale}, x_ring, scale_ring, scales, held);
  if (SKEW > 0 && group > 0 && walk.rounds() > 1 && walk.steps > SKEW * group)
    wait(w_full[SKEW * group], 0);
  for (; walk.more(); walk.next()) {
    const int n0 = walk.n0, t0 = walk.t0;
    const int row0 = TOKEN_ROWS ? t0 : n0, col0 = TOKEN_ROWS ? n0 : t0;
    float bias_held[HELD_BIASES];
    scales.fetch(p, row0, col0);
    Scales::hold(p, bias_held, n0);
#if BLOCK_SCALES
    float w_s[2][W_BLOCKS];
    const float* w_scales[W_BLOCKS];
    const int w_block = min(n0 + (TOKEN_ROWS ? 0 : group * 64), n - 1) / 128;
    for (int b = 0; b < W_BLOCKS; b++)
      w_scales[b] = w_scale + (long long)min(w_block + b, (n - 1) / 128) * walk.steps;
#endif
    int c = 0;
    if (VALUES) x.at = x_done.at = walk.first - held;
    auto multiply_tile = [&](int i) {
#if BLOCK_SCALES
#pragma unroll
      for (int b = 0; b < W_BLOCKS; b++) w_s[i][b] = w_scales[b][min(walk.first + c, walk.steps - 1)];
#endif
      c++;
      wait(w_full[w.at], w.parity);
      if (!VALUES) wait(x_full[x.at], x.parity);
      const u32 w_tile = w_tiles + w.at * (W_BYTES / 16), x_tile = x_tiles + x.at * (X_BYTES / 16);
      const u32 a = TOKEN_ROWS ? x_tile : w_tile, b = TOKEN_ROWS ? w_tile : x_tile;
      pin(product[i]);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int j = 0; j < TILE_K / 32; j++) multiply(product[i], descriptor(a + j * 2), descriptor(b + j * 2), j > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      w.advance();
      x.advance();
    };
    auto add_product = [&](int i) {
      pin(product[i]);
      const u32 w_slot = w_empty[w_done.at], x_slot = x_empty[VALUES ? 0 : x_done.at];
#if BLOCK_SCALES
      auto let_go = [&](u32 read) {
        __syncwarp();
        if (lane > 0) return;
        release(w_slot);
        if (!VALUES) release_read(x_slot, read);
      };
      const u32 at = scale_ring + x_done.at * SCALE_BYTES;
      if (TOKEN_ROWS) {
        float s[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(s[half])
                       : "r"(at + (warp * 16 + half * 8 + lane / 4) * 4));
        let_go(__float_as_uint(s[0]) | __float_as_uint(s[1]));
        // columns of one block of weights, as tiles start at multiples of COLS
        constexpr int ALIKE = W_BLOCKS == 1 ? ACC : (COLS & -COLS) / 2;
#pragma unroll
        for (int from = 0; from < ACC; from += ALIKE) {
          const bool second = W_BLOCKS > 1 && from * 2 >= 128 - n0 % 128;
          const float w_f = second ? w_s[i][W_BLOCKS - 1] : w_s[i][0];
          const float factor[2] = {s[0] * w_f, s[1] * w_f};
#pragma unroll
          for (int j = from; j < from + ALIKE; j++)
            acc[j] += product[i][j] * factor[j % 4 / 2];
        }
      } else {
        u32 read = 0;
#pragma unroll
        for (int j = 0; j < ACC; j += 4) {
          float even, odd;
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(even), "=f"(odd)
                       : "r"(at + lane % 4 * 8 + j * 8));
          read |= __float_as_uint(even);
          even *= w_s[i][0];
          odd *= w_s[i][0];
          acc[j] += product[i][j] * even;
          acc[j + 1] += product[i][j + 1] * odd;
          acc[j + 2] += product[i][j + 2] * even;
          acc[j + 3] += product[i][j + 3] * odd;
        }
        let_go(read);
      }
#else
      if (warp % 4 == 0 && lane == 0) {  // its warps wait for a product together
        release(w_slot);
        if (!VALUES) release(x_slot);
      }
#pragma unroll
      for (int j = 0; j < ACC; j++) acc[j] += product[i][j];
#endif
      w_done.advance();
      x_done.advance();
    };
#pragma unroll
    for (int i = 0; i < ACC; i++) acc[i] = 0;
    while (c < walk.count) {
#pragma unroll
      for (int i = 0; i < RUN; i++) {
        multiply_tile(i % 2);
        if (i > 0) {
          wait_products<1>();
          add_product((i - 1) % 2);
        }
      }
      wait_products<0>();
      add_product((RUN - 1) % 2);
    }
    if (walk.split()) add_parts(acc, shared(after), shared(&arrived), rank);
    scales.arrive(p, bias_held);
    if (STORED && warp % 4 == 0 && elected()) wait_stores_read();  // those of the tile before
    group_barrier(group);
    scale_tile(p, acc, scales);
    write_tile(p, &y_map, acc, out, warp, walk.split() ? rank : -1, n0, t0);
  }
  if (STORED && warp % 4 == 0 && elected()) wait_stores_read();
}
