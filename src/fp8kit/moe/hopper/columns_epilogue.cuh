// The epilogue where tokens are the MMA's columns (SWAP_AB).
//
// Accumulator i of a thread: token i / 4 * 8 + q * 2 + i % 2, feature i % 4 / 2 * 8 + g of its warp's 16.

__device__ __forceinline__ void all_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

// Shared by the epilogues of a block: the largest magnitudes of tokens, as bits, and their scales.
struct SharedFacts {
  static constexpr int QUANTIZED = FIRST ? MMA_N : 1;  // tokens
  TokenFacts tokens[WARPGROUPS];
  u32 of_warp[4 * WARPGROUPS][QUANTIZED];
  u32 of_peer[2][QUANTIZED];  // by parity of the tile
  float scale[QUANTIZED], reciprocal[QUANTIZED];
};

// Adds a partial sum times the scales of its tokens. Returns a value that depends on the scales read.
__device__ __forceinline__ u32 add_scaled(float (&acc)[ACC], const float (&sum)[ACC], u32 scales, float w) {
  u32 read = 0;
#pragma unroll
  for (int i = 0; i < ACC; i += 4) {
    float even, odd;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(even), "=f"(odd)
                 : "r"(scales + threadIdx.x % 4 * 8 + i * 8));
    read |= __float_as_uint(even);
    if (WEIGHT_BLOCKS) {
      even *= w;
      odd *= w;
    }
    acc[i] += sum[i] * even;
    acc[i + 1] += sum[i + 1] * odd;
    acc[i + 2] += sum[i + 2] * even;
    acc[i + 3] += sum[i + 3] * odd;
  }
  return read;
}

template <typename Product>
struct Epilogue {
  SharedFacts& facts;
  u8* buffer;
  u32 received;  // barrier of the peer's maxima
  int rank;
  u32 parity;
  float weight[2][2], bias[2][2];  // of features g and g + 8, by half

  __device__ static Epilogue make(SharedFacts& facts, u8* buffer, u32 received, int rank) {
    return {facts, buffer, received, rank};
  }

  // Loads factors and biases of the tile early, so that nothing waits for memory after the MMAs.
  __device__ void load(const TileWalk& tile, const Operands<Product>& of, int feature) {
    facts.tokens[threadIdx.x / 128].load(tile.row, tile.end, of);
    const int of_thread = feature + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < Product::HALVES; half++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = of.features.template row<Product>(of_thread + i * 8, half);
        if (!WEIGHT_BLOCKS) weight[half][i] = *of.factors.weight_of(tile.expert, row);
        bias[half][i] = of.factors.template bias_of<Product>(tile.expert, of.features.rows, row);
      }
  }

  __device__ void store(float (&acc)[2][ACC], const TileWalk& tile, const Operands<Product>& of, int feature) {
    const int features = of.features.count;
    const Destination& to = of.to;
    const int q = threadIdx.x % 4, g = threadIdx.x % 32 / 4, warpgroup = threadIdx.x / 128;
    const TokenFacts& tokens = facts.tokens[warpgroup];
    asm volatile("cp.async.wait_all;" ::: "memory");
    warpgroup_barrier(warpgroup);
#pragma unroll
    for (int half = 0; half < Product::HALVES; half++)
#pragma unroll
      for (int i = 0; i < ACC; i++)
        acc[half][i] = of.factors.template apply<Product>(acc[half][i], tokens.scale[i / 4 * 8 + q * 2 + i % 2],
                                              weight[half][i % 4 / 2], bias[half][i % 4 / 2]);
    if constexpr (Product::ACTIVATED) {
      const int of_thread = feature + threadIdx.x % 128 / 32 * 16 + g;
#pragma unroll
      for (int i = 0; i < ACC; i++) acc[0][i] = activated(acc[0][i], acc[1][i], of.gate);
      if (feature + 64 > features)  // rows past the last feature are in no group
#pragma unroll
        for (int i = 0; i < ACC; i++)
          if (of_thread + i % 4 / 2 * 8 >= features) acc[0][i] = 0.0f;
      if (GIVEN_SCALE) {
        if (threadIdx.x < MMA_N) facts.scale[threadIdx.x] = *to.scale;
        all_consumers();
      } else {
        scale_tokens(acc[0], tile, to);
      }
      store_codes(acc[0], tile, feature, features, to);
    } else {
#pragma unroll
      for (int half = 0; half < Product::HALVES; half++)
        store_numbers(acc[half], half, tile, feature + half * HALF_ROWS, features, to);
      warpgroup_barrier(warpgroup);  // the facts of the next tile may be loaded
    }
  }

  // Each of the two blocks of a cluster has one half of each group; they send each other their maxima.
  __device__ void scale_tokens(const float (&acc)[ACC], const TileWalk& tile, const Destination& to) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = threadIdx.x;
#pragma unroll
    for (int i = 0; i < ACC; i += 4)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 magnitude =
            max(__float_as_uint(acc[i + j]) & 0x7fffffff, __float_as_uint(acc[i + j + 2]) & 0x7fffffff);
#pragma unroll
        for (int other = 4; other < 32; other *= 2)
          magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, other));
        if (lane < 4) facts.of_warp[warp][i * 2 + lane * 2 + j] = magnitude;
      }
    if (CLUSTER > 1 && token == 0) barrier_expect(received, MMA_N * 4);
    all_consumers();
    if (token < MMA_N) {
      u32 magnitude = 0;
#pragma unroll
      for (int w = 0; w < 4 * WARPGROUPS; w++) magnitude = max(magnitude, facts.of_warp[w][token]);
      if (CLUSTER > 1) {
        send(in_block(shared(&facts.of_peer[parity][token]), rank ^ 1), magnitude, in_block(received, rank ^ 1));
        barrier_wait_cluster(received, parity);
        magnitude = max(magnitude, *(volatile u32*)&facts.of_peer[parity][token]);
      }
      const float scale = scale_of<F32>(magnitude, to.min_scale);
      facts.scale[token] = scale;
      facts.reciprocal[token] = __frcp_rn(scale);
      if (rank == 0 && tile.row + token < tile.end)
        to.scale[(long long)tile.w * to.pitch + tile.row + token] = scale;
    }
    parity ^= 1;
    all_consumers();
  }

  __device__ void store_codes(const float (&acc)[ACC], const TileWalk& tile, int feature, int features,
                              const Destination& to) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int warpgroup = threadIdx.x / 128;
#pragma unroll
    for (int from = 0; from < MMA_N; from += EPILOGUE_TOKENS) {
#pragma unroll
      for (int c = 0; c < EPILOGUE_TOKENS; c += 8) {
        const int i = (from + c) / 2, token = from + c + q * 2;
        const float s0 = facts.scale[token], s1 = facts.scale[token + 1];
        const float r0 = facts.reciprocal[token], r1 = facts.reciprocal[token + 1];
        const u32 low = encode_pair(acc[i], acc[i + 1], s0, s1, r0, r1);            // of feature g
        const u32 high = encode_pair(acc[i + 2], acc[i + 3], s0, s1, r0, r1);       // of feature g + 8
        // lanes of neighbouring features exchange a token each: two features of one token remain
        const u32 mine = low | high << 16, theirs = __shfl_xor_sync(~0u, mine, 4);
        const u32 pairs = g % 2 ? __byte_perm(mine, theirs, 0x3715) : __byte_perm(mine, theirs, 0x6240);
        u8* const line = buffer + (c + q * 2 + g % 2) * LINE_BYTES<Product> + warp * 16 + g / 2 * 2;
        *(u16*)line = (u16)pairs;
        *(u16*)(line + 8) = (u16)(pairs >> 16);
      }
      warpgroup_barrier(warpgroup);
      copy_lines<Product>(buffer, facts.tokens[warpgroup], tile.row, tile.end, from, feature, features, to);
      // the next tile passes other barriers before its first store
      if (from + EPILOGUE_TOKENS < MMA_N) warpgroup_barrier(warpgroup);
    }
  }

  // The lines of one buffer are copied while those of the other are written.
  __device__ void store_numbers(const float (&acc)[ACC], int half, const TileWalk& tile, int feature, int features,
                                const Destination& to) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, matrix = lane / 8, warpgroup = threadIdx.x / 128;
#pragma unroll
    for (int from = 0; from < MMA_N; from += Product::LINES) {
      const float* v = acc + from / 2;
      u8* const lines = buffer + (half * MMA_N + from) / Product::LINES % 2 * BUFFER_BYTES<Product>;
      const u32 line =
          shared(lines) + (matrix / 2 * 8 + lane % 8) * LINE_BYTES<Product> + (warp * 2 + matrix % 2) * 16;
      if (MMA_N == 8)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(line),
                     "r"(narrow(v[0], v[1])), "r"(narrow(v[2], v[3])) : "memory");
      else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(line),
                     "r"(narrow(v[0], v[1])), "r"(narrow(v[2], v[3])),
                     "r"(narrow(v[4], v[5])), "r"(narrow(v[6], v[7])) : "memory");
      warpgroup_barrier(warpgroup);
      copy_lines<Product>(lines, facts.tokens[warpgroup], tile.row, tile.end, from, feature, features, to);
    }
  }
};
