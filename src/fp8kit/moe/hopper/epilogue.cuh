// Shared by both epilogues: factors and biases, and the copy to global memory.

// The place of a result's features among the rows of an expert's weight.
struct Features {
  int count;   // I, or H
  int step;    // rows from feature to feature
  int second;  // rows from a gate to its up, in the first product
  int rows;    // of an expert

  // The row of a half for a feature of the first half.
  template <typename Product>
  __device__ int row(int feature, int half) const {
    constexpr bool PAIRED = Product::ACTIVATED;
    return min(feature + (PAIRED ? 0 : half * HALF_ROWS), count - 1) * step + (PAIRED ? half * second : 0);
  }
};

struct Factors {
  const float* token;  // per row, per token that is GATHERED, or per tensor; not read with TOKEN_GROUPS
  int token_stride;
  const float* weight;  // per row or per tensor of each expert; not read here with WEIGHT_BLOCKS
  int expert_stride, row_stride;
  const void* bias;  // [E, rows] or null

  __device__ const float* weight_of(int expert, long long row) const {
    return weight + (long long)expert * expert_stride + row * row_stride;
  }
  template <typename Product>
  __device__ float bias_of(int expert, int rows, int row) const {
    const long long at = (long long)expert * rows + row;
    if (!bias) return 0.0f;
    return load_value<Product::BIAS_KIND>(bias, at);
  }
  // The fp32 result of a sum, rounded as in the dense GEMM.
  template <typename Product>
  __device__ float apply(float sum, float token_factor, float weight_factor, float added) const {
    if (!Product::TOKEN_GROUPS) sum = __fmul_rn(sum, token_factor);
    if (WEIGHT_BLOCKS) return bias ? sum + added : sum;
    return bias ? __fmaf_rn(sum, weight_factor, added) : __fmul_rn(sum, weight_factor);
  }
};

// The memory for results.
struct Destination {
  void* y;  // codes [rows, I], or 16-bit numbers [pairs, H]
  float* scale;  // of codes: [groups, pitch], or one that is given
  int pitch;
  float min_scale;
};

// A product. It has two maps of weights, for the first and the second half of a tile's rows.
template <typename Product>
struct Operands {
  const TensorMap *first_map, *second_map, *token_map, *token_scale_map;
  int map_rows, second_map_row;  // rows of an expert in a map, and rows from the first half to the second
  int k, w_tiles;
  Factors factors;
  Features features;
  Gate gate;  // of the first product
  Destination to;
  const int* pair_of_row;  // of a product that gathers, or that stores rows by pair
  int top_k;

  static constexpr int CHUNKS = 2 / Product::HALVES;  // of TILE_K in a step

  __device__ int scale_steps() const { return (k + TILE_K - 1) / TILE_K; }
  // Steps beyond K load zeros.
  __device__ int steps() const {
    constexpr int TOGETHER = PIPELINED_STEPS * CHUNKS;
    return (scale_steps() + TOGETHER - 1) / TOGETHER * PIPELINED_STEPS;
  }
};

// Scales and pairs of a warpgroup's tokens, copied while the MMAs run.
struct TokenFacts {
  float scale[TOKENS];
  int pair[TOKENS];

  template <typename Product>
  __device__ void load(int row, int end, const Operands<Product>& of) {
    for (int i = threadIdx.x % 128; i < TOKENS; i += 128) {
      const int at = min(row + i, end - 1);
      if (!Product::TOKEN_GROUPS) {
        const int from = Product::GATHERED ? __ldcg(of.pair_of_row + at) / of.top_k : at;
        copy_async(&scale[i], of.factors.token + (long long)from * of.factors.token_stride);
      }
      if (!Product::ACTIVATED) copy_async(&pair[i], of.pair_of_row + at);
    }
  }
};

// Copies lines of a buffer to global memory: codes to their rows, 16-bit numbers to the rows of their pairs.
template <typename Product>
__device__ __forceinline__ void copy_lines(const u8* buffer, const TokenFacts& tokens, int row, int end,
                                           int from, int feature, int features, const Destination& to) {
  constexpr int VECTORS = Product::VECTORS, EACH_VECTOR = Product::ACTIVATED ? 16 : 8;
  constexpr int TURNS = (Product::LINES * VECTORS + Product::COPIERS - 1) / Product::COPIERS;
  const int thread = threadIdx.x % Product::COPIERS, at = feature + thread % VECTORS * EACH_VECTOR;
  uint4 held[TURNS];
  uint4* places[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; i++) {  // all loads before the first store
    const int line = min((thread + i * Product::COPIERS) / VECTORS, Product::LINES - 1), token = from + line;
    held[i] = *(const uint4*)(buffer + line * LINE_BYTES<Product> + thread % VECTORS * 16);
    const long long row_of_y = Product::ACTIVATED ? row + token : tokens.pair[token];
    places[i] = (uint4*)((u8*)to.y + (row_of_y * features + at) * (16 / EACH_VECTOR));
  }
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int line = (thread + i * Product::COPIERS) / VECTORS;
    if (line < Product::LINES && row + from + line < end && at < features) *places[i] = held[i];
  }
}
