// y[M, N] = (x[M, K] @ w[N, K].T) * scales + bias on Hopper.
//
// The weight gives the 64-row operand of wgmma and the tokens are its columns, so a tile wastes no
// rows however few tokens there are. One warp streams weight and token tiles through a ring in
// shared memory; consumer warpgroups multiply a tile of 128 along K, then add it to fp32 registers,
// because the tensor core itself keeps only about 14 bits of a sum. While one warpgroup adds or
// writes its result, another multiplies. Blocks of a cluster split K and add their parts through
// distributed shared memory in a fixed order, so bits do not depend on timing. Without a split, a
// block takes tile after tile. Weights start to stream before the kernel that quantizes x has ended.
//
// Set by the host: TOKENS, GROUPS, PARTS, STAGES, SPLIT, RESIDENT, PRODUCERS, REGISTERS,
// BLOCK_SCALES, STREAMED, OUT_KIND, BIAS_KIND.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int ROWS = 64 * GROUPS, TILE_K = 128, CONSUMERS = 128 * GROUPS;
constexpr int W_BYTES = ROWS * TILE_K, X_BYTES = TOKENS * TILE_K, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int SCALES = (TOKENS + 31) / 32 * 32;  // of one stage, in steps of 128 bytes
constexpr int SCALE_BYTES = BLOCK_SCALES ? SCALES * 4 : 0;
constexpr int ACC = TOKENS / 2;
static_assert(TOKENS == 8 || TOKENS % 16 == 0, "stmatrix stores 16 tokens at once");
static_assert(REGISTERS == 0 || PRODUCERS == 128, "setmaxnreg acts on whole warpgroups");
static_assert(STAGES >= PARTS, "products in flight hold their slots");
constexpr int OUT_TOKENS = TOKENS > 64 && TOKENS % 32 == 0 ? TOKENS / 2 : TOKENS;  // written at once
constexpr int OUT_PITCH = 144;         // bytes between tokens of 64 results; avoids bank conflicts
constexpr int SUM_PITCH = ROWS + 4;    // floats between tokens of partial sums; likewise
constexpr int F32 = 32, BF16 = 8;      // tags of OUT_KIND and BIAS_KIND; anything else is fp16

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void release(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int col, int row, u32 barrier,
                                     u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(col), "r"(row),
      "l"(policy) : "memory");
}

// K-major tile of 128 bytes a row in the 128-byte swizzle; 8 rows are 1024 bytes apart
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address >> 4) & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void multiply(float (&d)[ACC], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, @ADD@, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n@TOKENS@k32.f32.e4m3.e4m3 {@D@}, @A@, @B@, add, 1, 1;\n}"
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

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void group_barrier(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
}

__device__ __forceinline__ float4 read_peer(u32 address, int peer) {
  float4 v;
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(peer));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote));
  return v;
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

__device__ __forceinline__ void write(void* y, long long at, float value) {
  if (OUT_KIND == F32)
    ((float*)y)[at] = value;
  else
    ((u16*)y)[at] = (u16)narrow(value, 0);
}

__device__ __forceinline__ void write_quad(void* y, long long at, const float (&v)[4]) {
  if (OUT_KIND == F32)
    *(float4*)((float*)y + at) = make_float4(v[0], v[1], v[2], v[3]);
  else
    *(uint2*)((u16*)y + at) = make_uint2(narrow(v[0], v[1]), narrow(v[2], v[3]));
}

struct Problem {
  const float* x_scale;  // [M] * x_stride; with block scales it comes through the ring
  const float* w_scale;  // [N] * w_stride; blocks: [ceil(N/128), K/128]
  const void* bias;      // [N] or null
  void* y;               // [M, N]
  int m, n, x_stride, w_stride;
};

// Scales of a tile, copied while it is multiplied.
struct Scales {
  float x[GROUPS][TOKENS], w[ROWS];

  __device__ void fetch(const Problem& p, int n0, int t0) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    auto copy = [](float* to, const float* from) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared(to)), "l"(from)
                   : "memory");
    };
    if (BLOCK_SCALES) return;
    for (int i = thread; i < TOKENS; i += 128)
      copy(&x[group][i], p.x_scale + (long long)min(t0 + i, p.m - 1) * p.x_stride);
    if (thread < 64) {
      const int row = group * 64 + thread;
      copy(&w[row], p.w_scale + (long long)min(n0 + row, p.n - 1) * p.w_stride);
    }
  }
  __device__ static void arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }
};

// Weight and token tiles in an order that keeps few weights and tokens in use at a time.
struct Order {
  int w_tiles, t_tiles, span;

  __device__ int count() const { return w_tiles * t_tiles; }
  __device__ void at(int unit, int& n0, int& t0) const {
    const int band = unit / (span * w_tiles), width = min(span, t_tiles - band * span);
    const int inside = unit - band * span * w_tiles;
    n0 = inside / width * ROWS;
    t0 = (band * span + inside % width) * TOKENS;
  }
};

// Fragment i of a thread: token i / 4 * 8 + q * 2 + i % 2, row i % 4 / 2 * 8 + g of its warp's 16.
__device__ __forceinline__ void write_tile(const Problem& p, float (&acc)[ACC], u8* out,
                                           const Scales& scales, int n0, int t0) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  Scales::arrive();
  group_barrier(group);
  const int row0 = n0 + group * 64;
  const int row_g = group * 64 + warp * 16 + g;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float w_s = scales.w[row_g + half * 8];
    const float b = p.bias ? read_bias(p.bias, min(n0 + row_g + half * 8, p.n - 1)) : 0.0f;
#pragma unroll
    for (int i = half * 2; i < ACC; i += 4)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float sum = acc[i + j];
        if (!BLOCK_SCALES) sum = sum * scales.x[group][i / 4 * 8 + q * 2 + j] * w_s;
        acc[i + j] = p.bias ? sum + b : sum;
      }
  }
  if (OUT_KIND == F32) {
#pragma unroll
    for (int i = 0; i < ACC; i++) {
      const int token = t0 + i / 4 * 8 + q * 2 + i % 2, row = row0 + warp * 16 + i % 4 / 2 * 8 + g;
      if (token < p.m && row < p.n) write(p.y, (long long)token * p.n + row, acc[i]);
    }
    group_barrier(group);
    return;
  }
  // transposed on the way: 8 rows of one token become 16 bytes
  const int matrix = lane / 8;
  const u32 to = shared(out) + (matrix / 2 * 8 + lane % 8) * OUT_PITCH + warp * 32 + matrix % 2 * 16;
#pragma unroll
  for (int from = 0; from < ACC; from += OUT_TOKENS / 2) {
#pragma unroll
    for (int i = 0; i < OUT_TOKENS / 2; i += 8) {
      const float* v = acc + from + i;
      if (TOKENS == 8)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
                     "r"(narrow(v[0], v[1])), "r"(narrow(v[2], v[3])) : "memory");
      else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         to + i / 4 * 8 * OUT_PITCH),
                     "r"(narrow(v[0], v[1])), "r"(narrow(v[2], v[3])),
                     "r"(narrow(v[4], v[5])), "r"(narrow(v[6], v[7])) : "memory");
    }
    group_barrier(group);
    for (int i = thread; i < OUT_TOKENS * 8; i += 128) {
      const int token = t0 + from * 2 + i / 8, row = row0 + i % 8 * 8;
      if (token >= p.m || row >= p.n) continue;
      const uint4 eight = *(const uint4*)(out + i / 8 * OUT_PITCH + i % 8 * 16);
      u16* to_y = (u16*)p.y + (long long)token * p.n + row;
      if (p.n % 8 == 0) {
        *(uint4*)to_y = eight;
      } else {
        const u32 pair[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int j = 0; j < 8; j++)
          if (row + j < p.n) to_y[j] = (u16)(pair[j / 2] >> (j % 2 * 16));
      }
    }
    group_barrier(group);
  }
}

// Adds the parts of all blocks that split K: four weight rows of one token at a time, every load
// issued before the first sum.
__device__ __forceinline__ void add_parts(const Problem& p, const float* sums, const Scales& scales,
                                          int rank, int n0, int t0) {
  constexpr int QUADS = TOKENS * ROWS / 4, EACH = CONSUMERS * SPLIT;
  constexpr int ROUNDS = (QUADS + EACH - 1) / EACH;
  static_assert(EACH % (ROWS / 4) == 0, "a thread keeps its rows");
  const int mine = threadIdx.x + rank * CONSUMERS;
  const int row = 4 * mine % ROWS, used = max(0, min(p.m - t0, TOKENS)) * (ROWS / 4);
  if (n0 + row >= p.n) return;
  float4 value[ROUNDS][SPLIT];
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    const int quad = mine + round * EACH;
#pragma unroll
    for (int part = 0; part < SPLIT; part++)
      if (quad < used)
        value[round][part] = read_peer(shared(sums + 4 * quad / ROWS * SUM_PITCH + row), part);
  }
  float b[4] = {0, 0, 0, 0};
  if (p.bias) {
#pragma unroll
    for (int i = 0; i < 4; i++) b[i] = read_bias(p.bias, min(n0 + row + i, p.n - 1));
  }
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    const int quad = mine + round * EACH, token = 4 * quad / ROWS;
    if (quad >= used) return;
    float4 sum = value[round][0];
#pragma unroll
    for (int part = 1; part < SPLIT; part++) {
      sum.x += value[round][part].x;
      sum.y += value[round][part].y;
      sum.z += value[round][part].z;
      sum.w += value[round][part].w;
    }
    float four[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!BLOCK_SCALES) four[i] = four[i] * scales.x[0][token] * scales.w[row + i];
      if (p.bias) four[i] += b[i];
    }
    const long long at = (long long)(t0 + token) * p.n + n0 + row;
    if (p.n % 4 == 0) {
      write_quad(p.y, at, four);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (n0 + row + i < p.n) write(p.y, at + i, four[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, RESIDENT) swap_ab(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap x_scale_map, const float* __restrict__ x_scale,
    const float* __restrict__ w_scale, const void* __restrict__ bias, void* __restrict__ y, int m,
    int n, int k, int x_stride, int w_stride, int span) {
  extern __shared__ u8 dynamic[];
  __shared__ alignas(8) u64 full[STAGES], empty[STAGES];
  __shared__ Scales scales;
  u8* const base = dynamic + ((1024 - shared(dynamic) % 1024) % 1024);
  const u32 ring = shared(base), scale_ring = ring + STAGES * STAGE_BYTES;
  float* const sums = (float*)base;  // [TOKENS][SUM_PITCH], after the ring
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int rank = 0;
  if (SPLIT > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const Problem p = {x_scale, w_scale, bias, y, m, n, x_stride, w_stride};
  const Order order = {(n + ROWS - 1) / ROWS, (m + TOKENS - 1) / TOKENS, span};
  const int clusters = gridDim.x / SPLIT, own = blockIdx.x / SPLIT, units = order.count();
  // the cut of K does not depend on PARTS; what lies beyond K reads as zeros
  const int tiles = (k + TILE_K - 1) / TILE_K;
  const int part = SPLIT == 1 ? tiles : ((tiles + SPLIT - 1) / SPLIT + 3) / 4 * 4;
  const int first = rank * part;
  const int count = (max(0, min(part, tiles - first)) + PARTS - 1) / PARTS * PARTS;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&full[s])));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(&empty[s])),
                   "r"(4 * GROUPS));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp >= 4 * GROUPS) {
    if (REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 4 * GROUPS && lane == 0) {
      const u64 once = 0x12F0000000000000ull, keep = 0x14F0000000000000ull;  // L2 evict first, last
      const u64 w_policy = STREAMED ? once : keep;
      int n0, t0;
      auto load_w = [&](int c, int s) {
        const u32 barrier = shared(&full[s]);
        expect(barrier, STAGE_BYTES + SCALE_BYTES * TOKENS / SCALES);
        load(ring + s * STAGE_BYTES, &w_map, (first + c) * TILE_K, n0, barrier, w_policy);
      };
      auto load_x = [&](int c, int s) {
        const u32 barrier = shared(&full[s]);
        load(ring + s * STAGE_BYTES + W_BYTES, &x_map, (first + c) * TILE_K, t0, barrier, keep);
        if (BLOCK_SCALES)
          load(scale_ring + s * SCALE_BYTES, &x_scale_map, t0, first + c, barrier, keep);
      };
      const int ahead = min(count, STAGES);
      order.at(own, n0, t0);
      for (int c = 0; c < ahead; c++) load_w(c, c);
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
      for (int c = 0; c < ahead; c++) load_x(c, c);
      int step = 0;
      for (int unit = own; unit < units; unit += clusters) {
        order.at(unit, n0, t0);
        for (int c = 0; c < count; c++, step++) {
          if (step < ahead) continue;
          const int s = step % STAGES;
          wait(shared(&empty[s]), (step / STAGES + 1) & 1);
          load_w(c, s);
          load_x(c, s);
        }
      }
    }
    __syncwarp();
    if (SPLIT > 1) {
      cluster_barrier();
      cluster_barrier();
    }
  } else {
    if (REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int group = warp / 4, q = lane % 4;
    const u32 mine = ring + group * 64 * TILE_K;
    u8* const out = base + STAGES * (STAGE_BYTES + SCALE_BYTES) + group * OUT_TOKENS * OUT_PITCH;
    float acc[ACC], product[PARTS][ACC];
    int slot = 0;
    u32 parity = 0;
    for (int unit = own; unit < units; unit += clusters) {
      int n0, t0;
      order.at(unit, n0, t0);
      scales.fetch(p, n0, t0);
#pragma unroll
      for (int i = 0; i < ACC; i++) acc[i] = 0;
      for (int c = 0; c < count; c += PARTS) {
        int slots[PARTS];
#if BLOCK_SCALES
        float w_s[PARTS];
        const int block = min(n0 + group * 64, n - 1) / 128;
#pragma unroll
        for (int i = 0; i < PARTS; i++)
          w_s[i] = w_scale[(long long)block * tiles + min(first + c + i, tiles - 1)];
#endif
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
          wait(shared(&full[slot]), parity);
          slots[i] = slot;
          if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
          }
          const u64 a = descriptor(mine + slots[i] * STAGE_BYTES);
          const u64 b = descriptor(ring + slots[i] * STAGE_BYTES + W_BYTES);
          pin(product[i]);
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int j = 0; j < TILE_K / 32; j++) multiply(product[i], a + j * 2, b + j * 2, j > 0);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        }
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
          if (PARTS - 1 - i == 0) wait_products<0>();
          if (PARTS - 1 - i == 1) wait_products<1>();
          pin(product[i]);
#if BLOCK_SCALES
          const u32 at = scale_ring + slots[i] * SCALE_BYTES + q * 8;
#pragma unroll
          for (int j = 0; j < ACC; j += 4) {
            float even, odd;
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(even), "=f"(odd)
                         : "r"(at + j * 8));
            even *= w_s[i];
            odd *= w_s[i];
            acc[j] += product[i][j] * even;
            acc[j + 1] += product[i][j + 1] * odd;
            acc[j + 2] += product[i][j + 2] * even;
            acc[j + 3] += product[i][j + 3] * odd;
          }
          __syncwarp();
          if (lane == 0) release(shared(&empty[slots[i]]));
#else
          if (lane == 0) release(shared(&empty[slots[i]]));
#pragma unroll
          for (int j = 0; j < ACC; j++) acc[j] += product[i][j];
#endif
        }
      }
      if (SPLIT == 1) {
        write_tile(p, acc, out, scales, n0, t0);
      } else {
        Scales::arrive();
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
        for (int i = 0; i < ACC; i++) {
          const int token = i / 4 * 8 + q * 2 + i % 2;
          sums[token * SUM_PITCH + warp * 16 + i % 4 / 2 * 8 + lane / 4] = acc[i];
        }
      }
    }
    if (SPLIT > 1) {
      cluster_barrier();
      int n0, t0;
      order.at(own, n0, t0);
      add_parts(p, sums, scales, rank, n0, t0);
      cluster_barrier();  // a peer may still read this block's sums
    }
  }
}
