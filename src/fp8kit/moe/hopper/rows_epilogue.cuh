// The epilogue where tokens are the MMA's rows: a warp has whole groups, and copies only its own lines.
//
// Accumulator i of a thread: token i % 4 / 2 * 8 + g of its warp's 16, feature i / 4 * 8 + q * 2 + i % 2.

struct SharedFacts {
  TokenFacts tokens[WARPGROUPS];
  float weight[WARPGROUPS][2][MMA_N], bias[WARPGROUPS][2][MMA_N];  // by half
};

// Adds a partial sum times the scales of its tokens. Returns a value that depends on the scales read.
__device__ __forceinline__ u32 add_scaled(float (&acc)[ACC], const float (&sum)[ACC], u32 scales, float w) {
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(factor[i])
                 : "r"(scales + (threadIdx.x / 32 * 16 + i * 8 + threadIdx.x % 32 / 4) * 4));
  const u32 read = __float_as_uint(factor[0]) | __float_as_uint(factor[1]);
  if (WEIGHT_BLOCKS) {
    factor[0] *= w;
    factor[1] *= w;
  }
#pragma unroll
  for (int i = 0; i < ACC; i++) acc[i] += sum[i] * factor[i % 4 / 2];
  return read;
}

template <typename Product>
struct Epilogue {
  SharedFacts& facts;
  u8* buffer;  // of this warp
  float bias[2];  // of the feature that this thread loads, by half

  __device__ static Epilogue make(SharedFacts& facts, u8* buffer, u32, int) {
    return {facts, buffer + threadIdx.x % 128 / 32 * BUFFER_BYTES<Product>};
  }

  // Loads factors and biases of the tile early, so that nothing waits for memory after the MMAs.
  __device__ void load(const TileWalk& tile, const Operands<Product>& of, int feature) {
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    facts.tokens[warpgroup].load(tile.row + warpgroup * 64, tile.end, of);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = of.features.template row<Product>(feature + thread, half);
      if (!WEIGHT_BLOCKS) copy_async(&facts.weight[warpgroup][half][thread], of.factors.weight_of(tile.expert, row));
      bias[half] = of.factors.template bias_of<Product>(tile.expert, of.features.rows, row);
    }
  }

  __device__ void store(float (&acc)[2][ACC], const TileWalk& tile, const Operands<Product>& of, int feature) {
    const int features = of.features.count;
    const Destination& to = of.to;
    const int q = threadIdx.x % 4, g = threadIdx.x % 32 / 4, warp = threadIdx.x % 128 / 32;
    const int warpgroup = threadIdx.x / 128, row = tile.row + warpgroup * 64;
    const TokenFacts& tokens = facts.tokens[warpgroup];
    if (of.factors.bias)
#pragma unroll
      for (int half = 0; half < 2; half++) facts.bias[warpgroup][half][threadIdx.x % 128] = bias[half];
    asm volatile("cp.async.wait_all;" ::: "memory");
    warpgroup_barrier(warpgroup);
    const float token_factor[2] = {tokens.scale[warp * 16 + g], tokens.scale[warp * 16 + g + 8]};
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < ACC; i++) {
        const int of_half = i / 4 * 8 + q * 2 + i % 2;
        acc[half][i] = of.factors.template apply<Product>(acc[half][i], token_factor[i % 4 / 2], facts.weight[warpgroup][half][of_half],
                                     facts.bias[warpgroup][half][of_half]);
      }
    if constexpr (Product::ACTIVATED) {
#pragma unroll
      for (int i = 0; i < ACC; i++) acc[0][i] = activated(acc[0][i], acc[1][i], of.gate);
      if (feature + MMA_N > features)  // rows past the last feature are in no group
#pragma unroll
        for (int i = 0; i < ACC; i++)
          if (feature + i / 4 * 8 + q * 2 + i % 2 >= features) acc[0][i] = 0.0f;
      store_codes(acc[0], tile, row, feature, features, to);
    } else {
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int from = 0; from < MMA_N; from += LINE_FEATURES)
          store_numbers(acc[half] + from / 2, tile, row, feature + half * HALF_ROWS + from, features, to);
    }
    warpgroup_barrier(warpgroup);  // the facts of the next tile may be loaded
  }

  __device__ void store_codes(const float (&acc)[ACC], const TileWalk& tile, int row, int feature, int features,
                              const Destination& to) {
    const int q = threadIdx.x % 4, g = threadIdx.x % 32 / 4, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {  // tokens g and g + 8
      const int token = warp * 16 + i * 8 + g;
      float scale = 0, reciprocal = 0;
      if (GIVEN_SCALE) {
        scale = *to.scale;
      } else {
        u32 magnitude = 0;
#pragma unroll
        for (int j = 2 * i; j < ACC; j += 4) {
          magnitude = max(magnitude, __float_as_uint(acc[j]) & 0x7fffffff);
          magnitude = max(magnitude, __float_as_uint(acc[j + 1]) & 0x7fffffff);
        }
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, 1));
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, 2));
        scale = scale_of<F32>(magnitude, to.min_scale);
        reciprocal = __frcp_rn(scale);
        if (q == 0 && row + token < tile.end) to.scale[(long long)tile.w * to.pitch + row + token] = scale;
      }
#pragma unroll
      for (int j = 2 * i; j < ACC; j += 4)
        *(u16*)(buffer + (i * 8 + g) * LINE_BYTES<Product> + j / 4 * 8 + q * 2) =
            encode_pair(acc[j], acc[j + 1], scale, scale, reciprocal, reciprocal);
    }
    __syncwarp();
    copy_lines<Product>(buffer, facts.tokens[threadIdx.x / 128], row, tile.end, warp * 16, feature, features, to);
  }

  static constexpr int LINE_FEATURES = 64;  // of numbers

  __device__ void store_numbers(const float* acc, const TileWalk& tile, int row, int feature, int features,
                                const Destination& to) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < LINE_FEATURES; c += 16) {
      const float* v = acc + c / 2;
      const u32 line = shared(buffer) + lane % 16 * LINE_BYTES<Product> + (c / 8 + lane / 16) * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(line),
                   "r"(narrow(v[0], v[1])), "r"(narrow(v[2], v[3])),
                   "r"(narrow(v[4], v[5])), "r"(narrow(v[6], v[7])) : "memory");
    }
    __syncwarp();
    copy_lines<Product>(buffer, facts.tokens[threadIdx.x / 128], row, tile.end, warp * 16, feature, features, to);
    __syncwarp();
  }
};
