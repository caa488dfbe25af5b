// Quantization inside the GEMM: turns a few 16-bit tokens into codes and scales in shared memory,
// bit-equal to the separate quantizer.

struct DenseTokens {
  const u8* x;  // [M, K]
  long long row_bytes;
  int m, k;
  float min_scale;
};

// Quantizes all tokens of the tile into the token stages, the first of which has K step `first_step`.
// One or more whole warps share a row.
__device__ __forceinline__ void quantize_tokens(const DenseTokens& tokens, u32 stages, u32 stage_scales,
                                                ScalesAndBias& scales, int first_step) {
  constexpr int WARPS = 4 * WARPGROUPS / (QUANTIZE_ROWS ? QUANTIZE_ROWS : 1), STRIDE = WARPS * 32;
  __shared__ u32 maxima[4 * WARPGROUPS];
  const int warp = threadIdx.x / 32, row = warp / WARPS, first = threadIdx.x % STRIDE;
  const int vectors = row < tokens.m ? tokens.k / EACH : 0;
  const int begin = first_step * TILE_K / EACH, end = begin + TOKEN_STAGES * TILE_K / EACH;
  // whether other blocks of the cluster multiply all vectors of this warp
  auto elsewhere = [&](int at) {
    const int of_warp = at - threadIdx.x % 32;
    return SPLIT_K > 1 && (of_warp + 32 <= begin || of_warp >= end);
  };
  uint4 held[QUANTIZE_VECTORS];
#pragma unroll
  for (int i = 0; i < QUANTIZE_VECTORS; i++)
    held[i] = first + i * STRIDE < vectors && !(BLOCK_SCALES && elsewhere(first + i * STRIDE))
                  ? ((const uint4*)(tokens.x + row * tokens.row_bytes))[first + i * STRIDE]
                  : make_uint4(0, 0, 0, 0);
  float scale = 0, reciprocal = 0;
  if (!BLOCK_SCALES) {
    u32 magnitude = __reduce_max_sync(~0u, largest(held));
    if (threadIdx.x % 32 == 0) maxima[warp] = magnitude;
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
    for (int i = 0; i < WARPS; i++) magnitude = max(magnitude, maxima[row * WARPS + i]);
    scale = scale_of(magnitude, tokens.min_scale);
    reciprocal = __frcp_rn(scale);
    if (first < WARPGROUPS) scales.col[first][row] = scale;
  }
  auto store = [&](int at, u32 low, u32 high) {  // 8 codes
    const int byte = at % (TILE_K / EACH) * EACH, step = at / (TILE_K / EACH) - first_step;
    const u32 to = stages + step * X_BYTES + row * TILE_K + (byte / 16 ^ row) * 16 + byte % 16;
    if (at >= begin && at < end)
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
  };
  auto store_scale = [&](int at, float value) {
    const int step = at / (TILE_K / EACH) - first_step;
    if (at % (TILE_K / EACH) == 0 && at >= begin && at < end)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(stage_scales + step * SCALE_BYTES + row * 4),
                   "f"(value) : "memory");
  };
#pragma unroll
  for (int i = 0; i < QUANTIZE_VECTORS; i++) {
    const int at = first + i * STRIDE;
    if (elsewhere(at)) continue;
    if (BLOCK_SCALES) {  // 16 lanes hold a group
      u32 magnitude = largest((const uint4(&)[1])held[i]);
#pragma unroll
      for (int other = 1; other < TILE_K / EACH; other *= 2)
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, other));
      scale = scale_of(magnitude, tokens.min_scale);
      reciprocal = __frcp_rn(scale);
      if (at < vectors) store_scale(at, scale);
    }
    if (at < vectors)
      store(at, encode(held[i], 0, scale, reciprocal), encode(held[i], 1, scale, reciprocal));
  }
  for (int at = vectors + first; at < end; at += STRIDE) {  // zeros beyond M and K
    store(at, 0, 0);
    if (BLOCK_SCALES) store_scale(at, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // WGMMA reads through the async proxy
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}
