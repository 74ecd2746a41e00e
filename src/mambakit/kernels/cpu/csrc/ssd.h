// The SSD core in chunks, what its forward and backward share. The mathematics is in docs/math.md, "The chunked form";
// the plain twin is ops/ssd_recalculated.py.
//
// A chunk of `len` tokens is a matrix of q = len * m rows, the ranks of a token one after the other. Everything per
// token (decays, weights) is held once per row, so several ranks need no loop of their own. Matrices are padded with
// zeros to whole vectors: capital letters are padded sizes.
#pragma once

#include "border.h"
#include "extension.h"
#include "rows.h"
#include "ssd_factors.h"
#include "threads.h"

namespace MK_ISA {
namespace ssd {

// A tensor whose first two axes are batch and token, with their strides; the other axes are contiguous.
struct Sequence {
    MK_FIELDS(Sequence,
        const void* data;
        int64_t batch_stride, token_stride;
    )

    template <class Number = float>
    const Number* at(int64_t batch, int64_t token) const {
        return (const Number*)data + batch * batch_stride + token * token_stride;
    }
};

struct Ssd {
    MK_FIELDS(Ssd,
        int64_t b, s, m, h, p, g, r, chunk_len;
        Sequence v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh;
        const int64_t* segments_bs;  // or null
        const float* state_bhpr;
        bool narrow;  // v, b, c, y and their gradients are bfloat16
    )

    int64_t rows() const { return chunk_len * m; }
    int64_t P() const { return round_up(p, W); }
    int64_t R() const { return round_up(r, W); }
    int64_t Q() const { return round_up(rows(), W); }
    int64_t chunks() const { return ceil_div(s, chunk_len); }
};

// Hands out pieces of one block of memory. Without a block it only counts: lay out twice, first to learn the size.
struct Arena {
    float* block;
    int64_t used = 0;

    float* floats(int64_t count) {
        float* here = block ? block + used : nullptr;
        used += round_up(count, 16);
        return here;
    }
    double* doubles(int64_t count) { return (double*)floats(2 * count); }
    int64_t* integers(int64_t count) { return (int64_t*)floats(2 * count); }
};

// Tokens [start, start + len) of one row of the batch.
struct Chunk {
    int64_t batch, start, len;
    int64_t q;  // len * m
    // Where packed sequences end: tokens before `continuing` belong to the sequence that entered the chunk, those from
    // `leaving` on to the one that leaves it; `carried` says that they are the same.
    int64_t continuing, leaving;
    bool carried;
    int64_t* first_row;  // of the token's sequence in this chunk, per token
};

static void cut(const Ssd& x, int64_t batch, int64_t index, Chunk& c) {
    c.batch = batch;
    c.start = index * x.chunk_len;
    c.len = least(x.chunk_len, x.s - c.start);
    c.q = c.len * x.m;
    c.continuing = c.len;
    c.leaving = 0;
    for (int64_t l = 0; l < c.len; l++) c.first_row[l] = 0;
    if (x.segments_bs) {
        const int64_t* ids = x.segments_bs + batch * x.s + c.start;
        int64_t before = c.start ? ids[-1] : ids[0];
        if (ids[0] != before) c.continuing = 0;
        for (int64_t l = 1; l < c.len; l++) {
            bool same = ids[l] == ids[l - 1];
            c.first_row[l] = same ? c.first_row[l - 1] : l * x.m;
            if (same) continue;
            c.continuing = least(c.continuing, l);
            c.leaving = l;
        }
    }
    c.carried = c.continuing == c.len;
}

// Decays and weights of one head in a chunk, per row.
struct Decays {
    float *sum_high, *sum_low;  // running sum a_l of the log-decays: two floats hold enough digits to take differences
    float *w_now, *w_later;
    float* from_start;   // exp(a_l), 0 where another sequence entered
    float* to_end;       // exp(a_end - a_l), 0 where another sequence leaves
    float over;          // exp(a_end), 0 unless one sequence fills the chunk
    double* sum;

    void lay_out(Arena& arena, const Ssd& x) {
        sum_high = arena.floats(x.Q());
        sum_low = arena.floats(x.Q());
        w_now = arena.floats(x.Q());
        w_later = arena.floats(x.Q());
        from_start = arena.floats(x.Q());
        to_end = arena.floats(x.Q());
        sum = arena.doubles(x.chunk_len);
    }
};

// A log-decay whose exponential is zero. Beyond it, sums would lose the decays of others, and infinities their differences.
constexpr double FORGOTTEN = -1000;

static void find_decays(const Ssd& x, const Chunk& c, int64_t head, Decays& d) {
    double a = 0;
    for (int64_t l = 0; l < c.len; l++) {
        double da = (double)x.da_bsh.at(c.batch, c.start + l)[head];
        a += da < FORGOTTEN ? FORGOTTEN : da;
        d.sum[l] = a;
    }
    int64_t row = 0;
    for (int64_t l = 0; l < c.len; l++) {
        float high = (float)d.sum[l], low = (float)(d.sum[l] - (double)high);
        float w_now = x.w_now_bsh.at(c.batch, c.start + l)[head], w_later = x.w_later_bsh.at(c.batch, c.start + l)[head];
        float start = l < c.continuing ? high : -INFINITY, end = l < c.leaving ? -INFINITY : (float)(a - d.sum[l]);
        for (int64_t rank = 0; rank < x.m; rank++, row++) {
            d.sum_high[row] = high;
            d.sum_low[row] = low;
            d.w_now[row] = w_now;
            d.w_later[row] = w_later;
            d.from_start[row] = start;
            d.to_end[row] = end;
        }
    }
    for (; row < round_up(c.q, W); row++) {
        d.sum_high[row] = d.sum_low[row] = d.w_now[row] = d.w_later[row] = 0;
        d.from_start[row] = d.to_end[row] = -INFINITY;
    }
    for (int64_t i = 0; i < c.q; i += W) {
        store(d.from_start + i, vexp(load(d.from_start + i)));
        store(d.to_end + i, vexp(load(d.to_end + i)));
    }
    d.over = vexp(splat(c.carried ? (float)a : -INFINITY))[0];
}

MK_INLINE vi column_numbers(int64_t from) {
    vi numbers;
    for (int k = 0; k < W; k++) numbers[k] = k;
    return numbers + splat_int((int32_t)from);
}

// Decay from the writers in columns [at, at + W) to token l reading them, 0 unless they are earlier and of its sequence.
MK_INLINE vf pair_decay(const Ssd& x, const Chunk& c, const Decays& d, int64_t l, int64_t at) {
    int64_t row = l * x.m;
    vf gap = (splat(d.sum_high[row]) - load(d.sum_high + at)) + (splat(d.sum_low[row]) - load(d.sum_low + at));
    vi column = column_numbers(at);
    vi related = (column < splat_int((int32_t)row)) & (column >= splat_int((int32_t)c.first_row[l]));
    // Mask before exp: above the diagonal the gap is positive and may overflow.
    return vexp(choose(related, gap, splat(-INFINITY)));
}

// How much of what the columns wrote token l reads: decayed w_later before it, w_now of its own.
MK_INLINE vf pair_weight(const Ssd& x, const Decays& d, int64_t l, int64_t at, vf decay) {
    vi column = column_numbers(at);
    int64_t row = l * x.m;
    vi own = (column >= splat_int((int32_t)row)) & (column < splat_int((int32_t)(row + x.m)));
    return choose(own, splat(d.w_now[row]), decay * load(d.w_later + at));
}

// How far a row reaches: the columns of its own token and of those before it.
MK_INLINE int64_t reach(int64_t row, int64_t m) { return (row / m + 1) * m; }

// out = a b over `count` words, only the blocks that hold pairs of a row and its reach. b has one column per row of the
// chunk.
template <class Factors>
static void lower_product(int64_t q, int64_t m, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t count,
                          float* out, int64_t ld) {
    row_tiles(q, [&](auto rows, int64_t i) {
        constexpr int M = decltype(rows)::value;
        int64_t vectors = ceil_div(reach(i + M - 1, m), W);
        column_tiles(vectors, [&](auto columns, int64_t j) {
            Tile<M, decltype(columns)::value> tile;
            tile.clear();
            tile.template add_product<false, Factors>(a + i * lda, lda, b + j * W, ldb, count);
            tile.store_to(out + i * ld + j * W, ld);
        });
    });
}

// to = over * from + left^T right over the q rows of a chunk: how a state passes it, forwards or backwards. All factors
// are words down; `rests`, if not null, is added to `right`.
template <class Factors>
static void pass_chunk(const Ssd& x, int64_t q, const float* left, const float* right, const float* rests, float over,
                       const float* from, float* to) {
    int64_t P = x.P(), R = x.R(), count = words<Factors>(q);
    column_tiles(P / W, [&](auto columns, int64_t j) {
        row_tiles(x.r, [&](auto rows, int64_t i) {
            Tile<decltype(rows)::value, decltype(columns)::value> tile;
            tile.clear();
            tile.template add_product<true, Factors>(left + i, R, right + j * W, P, count);
            if (rests) tile.template add_product<true, Factors>(left + i, R, rests + j * W, P, count);
            tile.add_scaled(over, from + i * P + j * W, P);
            tile.store_to(to + i * P + j * W, P);
        });
    });
}

// A row in words, filled up with zeros.
template <class Factors, class Number>
static void copy_padded(const Number* from, int64_t n, float* to, int64_t width) {
    if constexpr (Factors::HELD > 1) {
        bfloat16* row = (bfloat16*)to;
        copy(from, n, row);
        clear(row + n, width - n);
    } else {
        int64_t i = 0;
        for (; i + W <= n; i += W) store(to + i, load(from + i));
        for (; i < width; i += W) store(to + i, i < n ? load_part(from + i, n - i) : vf{});
    }
}

// Asks for n numbers that will be read soon. They need not exist.
template <class Number>
MK_INLINE void prefetch_row(const Number* base, int64_t offset, int64_t n) {
    for (int64_t i = 0; i < n * (int64_t)sizeof(Number); i += 64) prefetch(base, offset * (int64_t)sizeof(Number) + i);
}

// The rows of a chunk from a tensor of `blocks` groups or heads of n numbers, in words by rows, padded to `width`
// numbers. The rows that will be asked for next lie `ahead` of these.
template <class Factors, class Number>
static void gather_rows(const Sequence& from, const Chunk& c, int64_t m, int64_t blocks, int64_t index, int64_t n,
                        float* to, int64_t width, int64_t ahead) {
    for (int64_t l = 0; l < c.len; l++) {
        const Number* token = from.at<Number>(c.batch, c.start + l) + index * n;
        for (int64_t rank = 0; rank < m; rank++, to += width / Factors::HELD) {
            const Number* row = token + rank * blocks * n;
            prefetch_row(row, ahead, n);
            copy_padded<Factors>(row, n, to, width);
        }
    }
}

// The other way: q rows of n floats to where a tensor has them, or added to what it has.
template <class Factors, class Number>
static void scatter_rows(const float* from, int64_t width, int64_t q, int64_t n, Number* to, int64_t ld, bool add) {
    for (int64_t i = 0; i < q; i++)
        for (int64_t j = 0; j < n; j += W) {
            Number* here = to + i * ld + j;
            vf x = load(from + i * width + j);
            if (add) x += load_part(here, n - j);
            if constexpr (sizeof(Number) < sizeof(float)) {
                if (n - j >= W) {
                    put_rounded<Factors>(here, x);
                    continue;
                }
            }
            store_part(here, x, n - j);
        }
}

// The state after a chunk, from that before it. b is words down, v words by rows. A state that is handed on is held to
// float32: what it is written with is rounded no further than to 16 bits.
template <class Factors, bool handed_on>
static void advance(const Ssd& x, const Chunk& c, const Decays& d, const float* b, const float* v, float* weighed,
                    const float* from, float* to) {
    auto weight = MK_BODY(int64_t i) { return d.to_end[i] * d.w_later[i]; };
    const float* rests = nullptr;
    if constexpr (handed_on) rests = weigh_rows_twice<Factors>(v, c.q, x.P(), weight, weighed);
    else weigh_rows_down<Factors>(v, c.q, x.P(), weight, weighed);
    pass_chunk<Factors>(x, c.q, b, weighed, rests, d.over, from, to);
}

// From the rows of one head (or group) to those visited next: the next one's, and after the last one the first one's of
// the next chunk, `step` tokens on.
static int64_t rows_ahead(const Sequence& rows, int64_t width, int64_t at, int64_t first, int64_t last, int64_t step) {
    return at + 1 < last ? width : (first - at) * width + step * rows.token_stride;
}

// Neighbouring heads of one row of the batch, of one group or of several.
struct Heads {
    int64_t batch, first, last;

    int64_t count() const { return last - first; }
};

// f(group, its first head here, one after its last here)
template <class F>
MK_INLINE void for_groups(const Ssd& x, const Heads& heads, const F& f) {
    int64_t per_group = x.h / x.g;
    for (int64_t at = heads.first; at < heads.last;) {
        int64_t end = least(heads.last, (at / per_group + 1) * per_group);
        f(at / per_group, at, end);
        at = end;
    }
}

// task(heads, range) for `ranges` about equal ranges of all heads of all rows of the batch, cut where a row ends.
template <class Task>
static void for_head_ranges(const Ssd& x, int64_t ranges, const Task& task) {
    int64_t all = x.b * x.h;
    parallel(ranges, [&](int64_t first, int64_t last) {
        for (int64_t range = first; range < last; range++)
            for (int64_t at = all * range / ranges, end = all * (range + 1) / ranges; at < end;) {
                int64_t batch = at / x.h, stop = least(end, (batch + 1) * x.h);
                task(Heads{batch, at - batch * x.h, stop - batch * x.h}, range);
                at = stop;
            }
    });
}

// Rows of a chunk as they come; `step` tokens on are those that will be asked for next.
template <class Factors>
static void gather(const Ssd& x, const Sequence& from, const Chunk& c, int64_t blocks, int64_t index, int64_t first,
                   int64_t last, int64_t n, int64_t step, float* to) {
    int64_t ahead = rows_ahead(from, n, index, first, last, step), width = round_up(n, W);
    if (x.narrow) gather_rows<Factors, bfloat16>(from, c, x.m, blocks, index, n, to, width, ahead);
    else if constexpr (Factors::HELD == 1) gather_rows<Factors, float>(from, c, x.m, blocks, index, n, to, width, ahead);
}

template <class Factors>
static void gather_side(const Ssd& x, const Sequence& from, const Chunk& c, int64_t group, const Heads& heads,
                        int64_t step, float* to) {
    int64_t per_group = x.h / x.g, first = heads.first / per_group, last = (heads.last - 1) / per_group + 1;
    gather<Factors>(x, from, c, x.g, group, first, last, x.r, step, to);
}

template <class Factors>
static void gather_values(const Ssd& x, const Sequence& from, const Chunk& c, int64_t head, const Heads& heads,
                          int64_t step, float* to) {
    gather<Factors>(x, from, c, x.h, head, heads.first, heads.last, x.p, step, to);
}

// body(Factors) with what products of these inputs are made of on this machine.
template <class Body>
MK_INLINE void with_factors(const Ssd& x, const Body& body) {
#if defined(MK_X86) && MK_WIDTH == 16
    if (x.narrow && mk_extension_in_use >= MK_BF16) return body(Bfloat16s());
#endif
    body(Floats());
}

}  // namespace ssd
}  // namespace MK_ISA
