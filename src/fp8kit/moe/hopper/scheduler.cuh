// The order in which blocks take tiles.

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
    const int4 loaded = LISTS ? *(const int4*)(tiles + tile) : __ldcg((const int4*)(tiles + tile));
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
