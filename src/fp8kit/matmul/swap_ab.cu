// y[M, N] = (x[M, K] @ w[N, K].T) * scales + bias for few rows of x, on Hopper.
//
// The weight is the 64-row operand of wgmma and the tokens are its columns, so a tile wastes no
// rows however few tokens there are. One warp streams weight and token tiles through a ring in
// shared memory; consumer warpgroups multiply a tile of 128 along K, then add it to fp32 registers,
// because the tensor core itself keeps only about 14 bits of a sum. A cluster splits K and adds its
// parts through distributed shared memory in a fixed order, so bits depend on neither M nor timing.
// Weights start to stream before the kernel that quantizes x has ended.
//
// Set by the host: TOKENS, STAGES, CLUSTER, GROUPS, BLOCK_SCALES, OUT_KIND, BIAS_KIND.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int TILE_N = 64 * GROUPS, TILE_K = 128, CONSUMERS = 128 * GROUPS;
constexpr int W_BYTES = TILE_N * TILE_K, X_BYTES = TOKENS * TILE_K, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int ACC = TOKENS / 2;
constexpr int F32 = 32, BF16 = 8;  // tags of OUT_KIND and BIAS_KIND; anything else is fp16

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

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int k, int row, u32 barrier,
                                     u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(row),
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

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ float4 read_peer(u32 address, int peer) {
  float4 v;
  if (CLUSTER == 1) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  } else {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(peer));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote));
  }
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

__device__ __forceinline__ void write(void* y, long long at, float value) {
  u16 bits;
  if (OUT_KIND == F32) {
    ((float*)y)[at] = value;
  } else if (OUT_KIND == BF16) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    ((u16*)y)[at] = bits;
  } else {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    ((u16*)y)[at] = bits;
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32) swap_ab(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,
    const float* __restrict__ x_scale,  // [M] * x_stride; blocks: [M, K/128] by the two strides
    const float* __restrict__ w_scale,  // [N] * w_stride; blocks: [ceil(N/128), K/128]
    const void* __restrict__ bias,      // [N] or null
    void* __restrict__ y,               // [M, N]
    int m, int n, int k, int x_stride, int x_stride_k, int w_stride) {
  extern __shared__ u8 dynamic[];
  __shared__ alignas(8) u64 full[STAGES], empty[STAGES];
  const u32 ring = (shared(dynamic) + 1023) & ~1023u;
  float* const sums = (float*)(dynamic + (ring - shared(dynamic)));  // [TOKENS][TILE_N], after the ring
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 rank = 0;
  if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int n0 = (blockIdx.x / CLUSTER) * TILE_N;
  const int tiles = (k + TILE_K - 1) / TILE_K, share = (tiles + CLUSTER - 1) / CLUSTER;
  const int first = rank * share, count = max(0, min(share, tiles - first));

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&full[s])));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(&empty[s])),
                   "r"(4 * GROUPS));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == 4 * GROUPS) {
    if (lane == 0) {
      const u64 once = 0x12F0000000000000ull, keep = 0x14F0000000000000ull;  // L2 evict first, last
      auto load_w = [&](int c) {
        const int s = c % STAGES;
        expect(shared(&full[s]), W_BYTES + X_BYTES);
        load(ring + s * STAGE_BYTES, &w_map, (first + c) * TILE_K, n0, shared(&full[s]), once);
      };
      auto load_x = [&](int c) {
        const int s = c % STAGES;
        load(ring + s * STAGE_BYTES + W_BYTES, &x_map, (first + c) * TILE_K, 0, shared(&full[s]),
             keep);
      };
      const int ahead = min(count, STAGES);
      for (int c = 0; c < ahead; c++) load_w(c);
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
      for (int c = 0; c < ahead; c++) load_x(c);
      for (int c = ahead; c < count; c++) {
        wait(shared(&empty[c % STAGES]), (c / STAGES + 1) & 1);
        load_w(c);
        load_x(c);
      }
    }
    __syncwarp();
  } else {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int g = lane / 4, q = lane % 4;
    const u32 mine = ring + (warp / 4) * 64 * TILE_K;
    float acc[ACC], part[ACC];
#pragma unroll
    for (int i = 0; i < ACC; i++) acc[i] = 0;
    for (int c = 0; c < count; c++) {
      const int s = c % STAGES;
#if BLOCK_SCALES
      float scale[ACC / 2];
      const float w_s = w_scale[(long long)((n0 + (warp / 4) * 64) / 128) * tiles + first + c];
#pragma unroll
      for (int i = 0; i < ACC / 2; i++) {
        const int token = min((i / 2) * 8 + q * 2 + i % 2, m - 1);
        scale[i] = w_s * x_scale[(long long)token * x_stride + (long long)(first + c) * x_stride_k];
      }
#endif
      wait(shared(&full[s]), (c / STAGES) & 1);
      const u64 a = descriptor(mine + s * STAGE_BYTES);
      const u64 b = descriptor(ring + s * STAGE_BYTES + W_BYTES);
      pin(part);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < TILE_K / 32; i++) multiply(part, a + i * 2, b + i * 2, i > 0);
      asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
      pin(part);
      if (lane == 0)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(&empty[s])) : "memory");
#pragma unroll
      for (int i = 0; i < ACC; i++) {
#if BLOCK_SCALES
        acc[i] += part[i] * scale[i / 4 * 2 + i % 2];
#else
        acc[i] += part[i];
#endif
      }
    }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
    for (int i = 0; i < ACC; i++) {
      const int token = i / 4 * 8 + q * 2 + i % 2, row = warp * 16 + i % 4 / 2 * 8 + g;
      sums[token * TILE_N + row] = acc[i];
    }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
  }
  if (CLUSTER > 1) cluster_barrier();
  if (warp < 4 * GROUPS) {
    // four weight rows of one token at a time; every load is issued before the first sum
    constexpr int QUADS = TOKENS * TILE_N / 4, EACH = CONSUMERS * CLUSTER;
    constexpr int ROUNDS = (QUADS + EACH - 1) / EACH;
    const int mine = threadIdx.x + rank * CONSUMERS, used = min(m, TOKENS) * (TILE_N / 4);
    float4 value[ROUNDS][CLUSTER];
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      const int quad = mine + round * EACH;
#pragma unroll
      for (int peer = 0; peer < CLUSTER; peer++)
        if (quad < used) value[round][peer] = read_peer(shared(sums + 4 * quad), peer);
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      const int quad = mine + round * EACH, token = 4 * quad / TILE_N, row = n0 + 4 * quad % TILE_N;
      if (quad >= used) break;
      float4 sum = value[round][0];
#pragma unroll
      for (int peer = 1; peer < CLUSTER; peer++) {
        sum.x += value[round][peer].x;
        sum.y += value[round][peer].y;
        sum.z += value[round][peer].z;
        sum.w += value[round][peer].w;
      }
      const float four[4] = {sum.x, sum.y, sum.z, sum.w};
      const float x_s = BLOCK_SCALES ? 1.0f : x_scale[token * x_stride];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (row + i >= n) break;
        float result = four[i];
        if (!BLOCK_SCALES) result = result * x_s * w_scale[(row + i) * w_stride];
        if (bias) result += read_bias(bias, row + i);
        write(y, (long long)token * n + row + i, result);
      }
    }
  }
  if (CLUSTER > 1) cluster_barrier();  // a peer may still read this block's shared memory
}
