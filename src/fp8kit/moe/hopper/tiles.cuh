// The tiles of tokens of all experts: how few pairs are sorted into them, and how blocks walk over them.
// Rows of a tile lie next to each other; its last rows may belong to no pair.

// A tile of TILE_TOKENS rows, the next of which belongs to the next tile.
struct TokenTile {
  int expert, rows;  // rows are those of all tiles of the expert
  int place;         // among the tiles of the expert << 16 | how many it has
  int unused;
};

struct Routes {
  const void* ids;
  int id_bytes, pairs, experts;

  // The expert of a pair, -1 for none.
  __device__ int expert(int pair) const {
    const long long id = id_bytes == 8 ? ((const long long*)ids)[pair] : ((const int*)ids)[pair];
    return id >= 0 && id < experts ? (int)id : -1;
  }
};

// Sorts at most FEW_PAIRS pairs by comparing each with each, which takes two barriers.
struct FewPairs {
  int4 experts[FEW_PAIRS / 4], ranks[FEW_PAIRS / 4];  // a rank counts earlier pairs of the expert
  TokenTile tiles[FEW_PAIRS];
  int count;  // of tiles

  // Calls store(pair, row) for each pair of this thread, with row -1 if it has no expert.
  template <typename Store>
  __device__ void sort(const Routes& routes, int threads, Store store) {
    int* const expert_of = (int*)experts;
    int* const rank_of = (int*)ranks;
    const int padded = (routes.pairs + 3) / 4;
    for (int i = threadIdx.x; i < padded * 4; i += threads)
      expert_of[i] = i < routes.pairs ? routes.expert(i) : -1;
    __syncthreads();
    for (int i = threadIdx.x; i < padded * 4; i += threads) {
      int rank = 0;
      for (int j = 0; j < padded; j++) {
        const int4 other = experts[j];
        const int expert = expert_of[i];
        rank += (other.x == expert && 4 * j < i) + (other.y == expert && 4 * j + 1 < i) +
                (other.z == expert && 4 * j + 2 < i) + (other.w == expert && 4 * j + 3 < i);
      }
      rank_of[i] = rank;
    }
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < routes.pairs; i += threads) {
      const int expert = expert_of[i], rank = rank_of[i];
      // tiles that pairs of smaller experts begin, and rows of this expert
      int before = 0, rows = 0;
      auto compare = [&](int other, int other_rank) {
        before += other >= 0 && other < expert && other_rank % TILE_TOKENS == 0;
        rows += other == expert;
      };
      for (int j = 0; j < padded; j++) {
        const int4 other = experts[j], other_rank = ranks[j];
        compare(other.x, other_rank.x);
        compare(other.y, other_rank.y);
        compare(other.z, other_rank.z);
        compare(other.w, other_rank.w);
      }
      const int place = rank / TILE_TOKENS, tile = before + place;
      if (expert >= 0 && rank % TILE_TOKENS == 0) {
        tiles[tile] = {expert, rows, place << 16 | (rows + TILE_TOKENS - 1) / TILE_TOKENS, 0};
        atomicAdd(&count, 1);
      }
      store(i, expert < 0 ? -1 : tile * TILE_TOKENS + rank % TILE_TOKENS);
    }
    __syncthreads();
  }
};

// Walks over (token tile, weight tile). All weights of an expert pass a band of its token tiles, then
// the next band, so that what a band reads stays in L2.
struct TileWalk {
  const TokenTile* tiles;
  int w_tiles, band_tiles, at, stride, total;
  int expert, row, end, w;  // of the present tile

  __device__ TileWalk(const TokenTile* tiles, int count, int w_tiles, int band_tiles, int at, int stride)
      : tiles(tiles), w_tiles(w_tiles), band_tiles(band_tiles), at(at), stride(stride),
        total(count * w_tiles) {
    locate();
  }
  __device__ bool more() const { return at < total; }
  __device__ void next() {
    at += stride;
    locate();
  }
  __device__ void locate() {
    if (!more()) return;
    const int tile = at / w_tiles;
    const int4 loaded = *(const int4*)(tiles + tile);
    const int place = loaded.z >> 16, count = loaded.z & 0xffff, first = tile - place;
    const int of_expert = at - first * w_tiles;
    const int band = of_expert / (band_tiles * w_tiles), in_band = of_expert - band * band_tiles * w_tiles;
    const int width = min(band_tiles, count - band * band_tiles);
    w = in_band / width;
    const int chosen = band * band_tiles + in_band - w * width;
    expert = loaded.x;
    row = (first + chosen) * TILE_TOKENS;
    end = row + min(TILE_TOKENS, loaded.y - chosen * TILE_TOKENS);
  }
};
