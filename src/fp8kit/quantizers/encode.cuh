// Quantization for all CUDA C++ kernels: from 16-byte vectors of values to e4m3 codes, bit-equal to
// ``quantizers.reference``.
//
// Set by the host: KIND, the tag of the values' dtype.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int F32 = 32, BF16 = 8;          // tags of dtypes; anything else is fp16
[[maybe_unused]] constexpr int EACH = KIND == F32 ? 4 : 8;  // values in a vector

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 in_block(u32 address, int rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Stores a word in the shared memory of a block of the cluster, and adds its bytes to a barrier there.
__device__ __forceinline__ void send(u32 address, u32 word, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(word), "r"(barrier) : "memory");
}

// Widens the 16-bit value in the lower half of a word.
template <int KIND_ = KIND>
__device__ __forceinline__ float widen(u32 half_bits) {
  if (KIND_ == BF16) return __uint_as_float(half_bits << 16);
  float value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
      : "=f"(value) : "r"(half_bits));
  return value;
}

template <int KIND_>
__device__ __forceinline__ float load_value(const void* values, long long at) {
  return KIND_ == F32 ? ((const float*)values)[at] : widen<KIND_>(((const u16*)values)[at]);
}

// Rounds two values to 16 bits and packs them into a word.
template <int KIND_ = KIND>
__device__ __forceinline__ u32 narrow(float low, float high) {
  u32 bits;
  if (KIND_ == BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// Maximum of magnitudes as bits, which order like the values, with NaN above infinity. A word holds
// one of 32 bits, or two of 16.
__device__ __forceinline__ u32 larger(u32 magnitude, u32 word) {
  if (KIND == F32) return max(magnitude, word & 0x7fffffffu);
  asm("max.u16x2 %0, %0, %1;" : "+r"(magnitude) : "r"(word & 0x7fff7fffu));
  return magnitude;
}

template <int VECTORS_>
__device__ __forceinline__ u32 largest(const uint4 (&held)[VECTORS_]) {
  u32 magnitude = 0;
#pragma unroll
  for (int i = 0; i < VECTORS_; i++) {
    magnitude = larger(larger(magnitude, held[i].x), held[i].y);
    magnitude = larger(larger(magnitude, held[i].z), held[i].w);
  }
  return KIND == F32 ? magnitude : max(magnitude & 0xffff, magnitude >> 16);
}

// The scale of a group, from the bits of its largest magnitude.
template <int KIND_ = KIND>
__device__ __forceinline__ float scale_of(u32 magnitude, float min_scale) {
  const float amax = KIND_ == F32 ? __uint_as_float(magnitude) : widen<KIND_>(magnitude);
  const float scale = fmaxf(__fdiv_rn(amax, 448.0f), min_scale);
  return amax < __uint_as_float(0x7f800000) ? scale : __uint_as_float(0x7fc00000);
}

// Two multiply-adds correct a product with the rounded reciprocal: the code is that of the true
// quotient, see triton_encode.
__device__ __forceinline__ float divide(float x, float scale, float reciprocal) {
  const float q = __fmul_rn(x, reciprocal);
  return __fmaf_rn(__fmaf_rn(q, scale, -x), -reciprocal, q);
}

// Encodes the quotients of four values: an fp32 vector, or one half of a 16-bit vector.
template <typename Quotient>
__device__ __forceinline__ u32 encode_by(const uint4& vector, int half, Quotient quotient) {
  const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
  float v[4];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const u32 word = words[KIND == F32 ? e : 2 * half + e / 2];
    v[e] = KIND == F32 ? __uint_as_float(word) : widen(e % 2 ? word >> 16 : word & 0xffff);
    v[e] = quotient(v[e]);
  }
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1]), "f"(v[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3]), "f"(v[2]));
  return low | (u32)high << 16;
}

__device__ __forceinline__ u32 encode(const uint4& vector, int half, float scale,
                                      float reciprocal) {
  return encode_by(vector, half, [&](float x) { return divide(x, scale, reciprocal); });
}
