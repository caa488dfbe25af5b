// A token that the threads of a block hold and quantize, bit-equal to ``quantizers.reference``.
//
// Set by the host: VECTORS of 16 bytes that a thread holds, and SCALES, 0 for one per row, 1 per 1x128 group, 2 for a
// given one.

template <int THREADS_>
struct HeldToken {
  uint4 held[VECTORS];

  __device__ __forceinline__ void load(const uint4* x, int vectors) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int at = threadIdx.x + i * THREADS_;
      held[i] = at < vectors ? x[at] : make_uint4(0, 0, 0, 0);
    }
  }
  // Shares each warp's maximum with the others; the caller passes a barrier before `quantize`.
  __device__ __forceinline__ void put_maximum(u32* maxima) const {
    if (SCALES != 0) return;
    const u32 magnitude = __reduce_max_sync(~0u, largest(held));
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = magnitude;
  }
  // Calls store(i, at, codes, scale) for the i-th vector of a thread, whose index in the row is `at` < `vectors`.
  // Returns the scale of the row, if it has one.
  template <typename Store>
  __device__ __forceinline__ float quantize(const u32* maxima, const float* given_scale, float min_scale, int vectors,
                                            Store store) const {
    float scale = 0, reciprocal = 0;
    if (SCALES == 0) {
      u32 magnitude = 0;
#pragma unroll
      for (int w = 0; w < THREADS_ / 32; w++) magnitude = max(magnitude, maxima[w]);
      scale = scale_of(magnitude, min_scale);
    }
    if (SCALES == 2) scale = *given_scale;
    if (SCALES != 1) reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int at = threadIdx.x + i * THREADS_;
      if (SCALES == 1) {  // 16 lanes hold a group
        u32 magnitude = largest((const uint4(&)[1])held[i]);
#pragma unroll
        for (int other = 1; other < 16; other *= 2)
          magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, other));
        scale = scale_of(magnitude, min_scale);
        reciprocal = __frcp_rn(scale);
      }
      if (at >= vectors) continue;
      // a given scale may be any number, so it divides as IEEE, like the reference
      const auto codes_of = [&](int half) {
        return SCALES == 2 ? encode_by(held[i], half, [&](float v) { return __fdiv_rn(v, scale); })
                           : encode(held[i], half, scale, reciprocal);
      };
      store(i, at, make_uint2(codes_of(0), codes_of(1)), scale);
    }
    return scale;
  }
};
