// codes[M, K] = e4m3(x / scale), scale[M] = max(max_k |x| / 448, min_scale), for few rows.
//
// A row belongs to a cluster of blocks, and stays in their registers from the one read to the one
// write: each warp sends its maximum to every block of the cluster, all of which then agree.
//
// Set by the host: KIND, VECTORS.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int F32 = 32, BF16 = 8;          // tags of KIND; anything else is fp16
constexpr int EACH = KIND == F32 ? 4 : 8;  // elements of 16 bytes
constexpr int MOST_WARPS = 16, MOST_BLOCKS = 8;

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 in_block(u32 address, int rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ float widen(u32 half_bits) {
  if (KIND == BF16) return __uint_as_float(half_bits << 16);
  float value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
      : "=f"(value) : "r"(half_bits));
  return value;
}

// magnitudes are ordered like their bits, with NaN above infinity
__device__ __forceinline__ u32 larger(u32 magnitude, u32 word) {
  if (KIND == F32) return max(magnitude, word & 0x7fffffffu);
  asm("max.u16x2 %0, %0, %1;" : "+r"(magnitude) : "r"(word & 0x7fff7fffu));
  return magnitude;
}

// two multiply-adds after a rounded reciprocal: the code of the true quotient, see triton_numerics
__device__ __forceinline__ float divide(float x, float scale, float reciprocal) {
  const float q = __fmul_rn(x, reciprocal);
  return __fmaf_rn(__fmaf_rn(q, scale, -x), -reciprocal, q);
}

__device__ __forceinline__ u32 encode(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS) cluster_rows_kernel(
    const u8* __restrict__ x, float* __restrict__ scales, u8* __restrict__ codes,
    long long row_bytes, int vectors, float min_scale) {
  __shared__ u32 maxima[MOST_WARPS * MOST_BLOCKS];
  __shared__ alignas(8) u64 arrived;
  int rank, blocks;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const long long row = blockIdx.x / blocks;

  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&arrived)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(&arrived)),
                 "r"(blocks * warps * 4) : "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  uint4 held[VECTORS];
  u32 magnitude = 0;
  const int first = rank * blockDim.x + threadIdx.x, step = blocks * blockDim.x;
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
    held[i] = first + i * step < vectors
                  ? *(const uint4*)(x + row * row_bytes + (long long)(first + i * step) * 16)
                  : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    magnitude = larger(larger(magnitude, held[i].x), held[i].y);
    magnitude = larger(larger(magnitude, held[i].z), held[i].w);
  }
  if (KIND != F32) magnitude = max(magnitude & 0xffff, magnitude >> 16);
  magnitude = __reduce_max_sync(~0u, magnitude);
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all barriers have been set up
  if (lane < blocks)
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
            in_block(shared(&maxima[rank * warps + warp]), lane)),
        "r"(magnitude), "r"(in_block(shared(&arrived), lane)) : "memory");
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n}" ::"r"(shared(&arrived)) : "memory");
  for (int i = lane; i < blocks * warps; i += 32) magnitude = max(magnitude, maxima[i]);
  magnitude = __reduce_max_sync(~0u, magnitude);

  const float amax = KIND == F32 ? __uint_as_float(magnitude) : widen(magnitude);
  float scale = fmaxf(__fdiv_rn(amax, 448.0f), min_scale);
  if (!(amax < __uint_as_float(0x7f800000))) scale = __uint_as_float(0x7fc00000);
  const float reciprocal = __frcp_rn(scale);
  if (rank == 0 && threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = first + i * step;
    if (at >= vectors) continue;
    const u32 words[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
    u32 out[EACH / 4];
#pragma unroll
    for (int j = 0; j < EACH / 4; j++) {
      float v[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const u32 word = words[KIND == F32 ? e : 2 * j + e / 2];
        v[e] = KIND == F32 ? __uint_as_float(word) : widen(e % 2 ? word >> 16 : word & 0xffff);
        v[e] = divide(v[e], scale, reciprocal);
      }
      out[j] = encode(v[0], v[1]) | encode(v[2], v[3]) << 16;
    }
    u8* const to = codes + row * vectors * EACH + (long long)at * EACH;
    if (KIND == F32)
      *(u32*)to = out[0];
    else
      *(uint2*)to = make_uint2(out[0], out[EACH / 4 - 1]);
  }
}
