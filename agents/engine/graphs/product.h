// Products of matrices with all of AVX-512, which go into graphs as they stand here.
#ifndef STEADYRL_PRODUCT
#define STEADYRL_PRODUCT

#include <immintrin.h>
#include <algorithm>
#include <cstdint>

namespace steadyrl {

constexpr int64_t LANES = 16;         // numbers in a vector
constexpr int64_t WIDE = 4 * LANES;   // columns of a panel: with six rows, sums fill the registers
constexpr int64_t DEEP = 256;         // rows of a panel, which stays in a near cache
constexpr int64_t SEVERAL = 2000000;  // multiplications that several threads are worth

// Numbers of a matrix, so many apart from row to row (down) and from column to column (across).
struct Matrix {
  const float* at;
  int64_t rows, columns, down, across;

  Matrix part(int64_t row, int64_t column, int64_t tall, int64_t wide) const {
    return {at + row * down + column * across, tall, wide, down, across};
  }
};

// Vectors side by side, of which the last one may have fewer columns.
template <int V>
struct Mask {
  __mmask16 last;
  __mmask16 operator[](int vector) const { return vector + 1 < V ? 0xffff : last; }
};

// Write, or add, R rows times a panel of V vectors to `sums`, whose rows are `apart`.
template <int R, int V>
inline void tile(const Matrix& left, const Matrix& panel, float* sums, int64_t apart, bool adds) {
  const Mask<V> mask{__mmask16(0xffff >> (V * LANES - panel.columns))};
  __m512 total[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      total[r][v] = adds ? _mm512_maskz_loadu_ps(mask[v], sums + r * apart + v * LANES)
                         : _mm512_setzero_ps();
  for (int64_t k = 0; k < panel.rows; k++) {
    __m512 weights[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      weights[v] = _mm512_maskz_loadu_ps(mask[v], panel.at + k * panel.down + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const __m512 given = _mm512_set1_ps(left.at[r * left.down + k * left.across]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) total[r][v] = _mm512_fmadd_ps(given, weights[v], total[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      _mm512_mask_storeu_ps(sums + r * apart + v * LANES, mask[v], total[r][v]);
}

// All rows, R at a time; those that are left over by fewer.
template <int R, int V>
void strip(Matrix left, const Matrix& panel, float* sums, int64_t apart, bool adds) {
  while (left.rows >= R) {
    tile<R, V>(left, panel, sums, apart, adds);
    left = left.part(R, 0, left.rows - R, left.columns);
    sums += R * apart;
  }
  if constexpr (R > 1) strip<R / 2, V>(left, panel, sums, apart, adds);
}

// A panel whose rows are vectors as they lie, or a copy of it in `place` that is turned.
inline Matrix lying(const Matrix& panel, float* place) {
  if (panel.across == 1) return panel;
  const bool along = panel.down == 1;
  for (int64_t n = 0; n < panel.columns; n += 4)
    for (int64_t k = 0; k < panel.rows; k += 4) {
      const Matrix block = panel.part(k, n, std::min<int64_t>(4, panel.rows - k),
                                      std::min<int64_t>(4, panel.columns - n));
      float* to = place + k * WIDE + n;
      if (along && block.rows == 4 && block.columns == 4) {
        __m128 line[4];
        for (int v = 0; v < 4; v++) line[v] = _mm_loadu_ps(block.at + v * block.across);
        _MM_TRANSPOSE4_PS(line[0], line[1], line[2], line[3]);
        for (int v = 0; v < 4; v++) _mm_storeu_ps(to + v * WIDE, line[v]);
        continue;
      }
      for (int64_t row = 0; row < block.rows; row++)
        for (int64_t v = 0; v < block.columns; v++)
          to[row * WIDE + v] = block.at[row * block.down + v * block.across];
    }
  return {place, panel.rows, panel.columns, WIDE, 1};
}

// sums = left · right
inline void multiply(const Matrix& left, const Matrix& right, float* sums, int64_t apart) {
  alignas(64) float place[DEEP * WIDE];
  for (int64_t k = 0; k == 0 || k < right.rows; k += DEEP)  // of nothing the sums are 0
    for (int64_t j = 0; j < right.columns; j += WIDE) {
      const int64_t deep = std::min(DEEP, right.rows - k), wide = std::min(WIDE, right.columns - j);
      const Matrix panel = lying(right.part(k, j, deep, wide), place);
      const Matrix given = left.part(0, k, left.rows, deep);
      switch ((wide - 1) / LANES) {
        case 0: strip<8, 1>(given, panel, sums + j, apart, k); break;
        case 1: strip<12, 2>(given, panel, sums + j, apart, k); break;
        case 2: strip<8, 3>(given, panel, sums + j, apart, k); break;
        default: strip<6, 4>(given, panel, sums + j, apart, k);
      }
    }
}

// The same for several pairs of matrices, whose numbers are so many apart from pair to pair.
inline void multiply(const Matrix& left, int64_t left_apart, const Matrix& right,
                     int64_t right_apart, float* sums, int64_t pairs, int threads) {
  const bool several = threads > 1 && left.rows * right.rows * right.columns >= SEVERAL;
  const int64_t parts = several ? threads : 1, tall = (left.rows + parts - 1) / parts;
#pragma omp parallel for num_threads(parts) if (several)
  for (int64_t each = 0; each < pairs * parts; each++) {
    const int64_t pair = each / parts, row = each % parts * tall;
    const int64_t rows = std::min(tall, left.rows - row);
    if (rows <= 0) continue;
    Matrix given = left.part(row, 0, rows, left.columns), weights = right;
    given.at += pair * left_apart;
    weights.at += pair * right_apart;
    multiply(given, weights, sums + (pair * left.rows + row) * right.columns, right.columns);
  }
}

}  // namespace steadyrl
#endif
