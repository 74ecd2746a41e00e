// Causal attention with grouped queries as a part of a decoded model.
//
// The slots that a token sees are cut into pieces of PIECE, so that few heads keep many threads busy. Each piece has a
// softmax of its own, and what the pieces add up to does not depend on threads or other rows.
#pragma once

#include "part.h"
#include "rotation.h"
#include "step.h"

namespace MK_ISA {

struct AttentionStep {
    MK_FIELDS(AttentionStep,
        int64_t heads, kv_heads, p;
        int64_t window;       // tokens that one sees, itself among them; 0: all
        float scale;          // of the products of queries and keys
        int64_t angles;       // pairs (q, q + angles) of a head's channels that turn; 0: none
        const double* rates;  // [angles]: by how much per position
    )

    int64_t group() const { return heads / kv_heads; }
    int64_t projected() const { return (heads + 2 * kv_heads) * p; }
    // Tokens that the one at `position` sees, itself among them.
    int64_t seen(int64_t position) const { return window ? least(position + 1, window) : position + 1; }
};

struct AttentionPart {
    MK_FIELDS(AttentionPart,
        AttentionStep step;
        Matrix in_proj, out_proj;
        float *k, *v;          // [texts][slots][kv_heads][p], tokens in their order
        const int64_t* first;  // [texts]: the position of the token in slot 0
        int64_t* position;     // [places]: tokens so far
        int64_t slots;
    )
};

constexpr int64_t PIECE = 256;
// Slots between what is multiplied and what is asked for from memory.
constexpr int64_t SLOTS_AHEAD = 16;
// Heads that share the reading of keys and values.
constexpr int TOGETHER = 4;

// scores[g][t] = q[g] . k[t] for T slots from t on.
template <int G, int T>
MK_INLINE void score_slots(const float* q, const float* k, int64_t pitch, int64_t p, int64_t t, float (*scores)[PIECE]) {
    vf total[G][T] = {};
    each_vector(p, MK_BODY(int64_t i, int64_t count) {
        vf key[T];
        for (int j = 0; j < T; j++) key[j] = load_part(k + (t + j) * pitch + i, count);
        for (int g = 0; g < G; g++) {
            const vf query = load_part(q + g * p + i, count);
            for (int j = 0; j < T; j++) total[g][j] += query * key[j];
        }
    });
    for (int g = 0; g < G; g++)
        for (int j = 0; j < T; j++) scores[g][t + j] = sum(total[g][j]);
}

// scores[n] become exp(score - largest); returns the largest, and the sum in `total`.
MK_INLINE float exponentiate(float* scores, int64_t n, float* total) {
    float largest = scores[0];
    if (n >= W) {
        vf most = load(scores);
        for (int64_t t = 0; t + W <= n; t += W) most = vmax(load(scores + t), most);
        for (int64_t lane = 0; lane < W; lane++) largest = most[lane] > largest ? most[lane] : largest;
    }
    for (int64_t t = n / W * W; t < n; t++) largest = scores[t] > largest ? scores[t] : largest;
    vf sums = {};
    each_vector(n, MK_BODY(int64_t t, int64_t count) {
        store_part(scores + t, vexp(load_part(scores + t, count) - splat(largest)), count);
        sums += load_part(scores + t, count);
    });
    *total = sum(sums);
    return largest;
}

// y[g][i...] = sum_t weight[g][t] v[t][i...] for V vectors of channels, of the last one `count` lanes.
template <int G, int V>
MK_INLINE void weigh_values(
    const float (*weight)[PIECE], const float* v, int64_t pitch, int64_t n, int64_t count, float* y, int64_t y_pitch) {
    vf total[G][V] = {};
    for (int64_t t = 0; t < n; t++) {
        vf value[V];
        for (int i = 0; i < V; i++) value[i] = load_part(v + t * pitch + i * W, i + 1 < V ? W : count);
        for (int g = 0; g < G; g++)
            for (int i = 0; i < V; i++) total[g][i] += splat(weight[g][t]) * value[i];
    }
    for (int g = 0; g < G; g++)
        for (int i = 0; i < V; i++) store_part(y + g * y_pitch + i * W, total[g][i], i + 1 < V ? W : count);
}

// What G heads see in n slots, each [p] sums, the largest score and the sum of weights: y[g * y_pitch + ...].
template <int G>
static void attend_piece(
    const float* q, const float* k, const float* v, int64_t pitch, int64_t n, int64_t p, float* y, int64_t y_pitch) {
    float(*scores)[PIECE] = (float(*)[PIECE])scratch<STEP_SCORES>(G * PIECE);
    int64_t t = 0;
    for (; t + 2 <= n; t += 2) {
        for (int64_t j = t; j < t + 2; j++)
            for (int64_t i = 0; i < p; i += 16) {
                prefetch(k, ((j + SLOTS_AHEAD) * pitch + i) * (int64_t)sizeof(float));
                prefetch(v, (j * pitch + i) * (int64_t)sizeof(float));
            }
        score_slots<G, 2>(q, k, pitch, p, t, scores);
    }
    if (t < n) score_slots<G, 1>(q, k, pitch, p, t, scores);
    for (int g = 0; g < G; g++) {
        float* own = y + g * y_pitch + p;
        own[0] = exponentiate(scores[g], n, own + 1);
    }
    constexpr int V = W == 16 ? 4 : 2;
    int64_t i = 0;
    for (; i + V * W <= p; i += V * W) weigh_values<G, V>(scores, v + i, pitch, n, W, y + i, y_pitch);
    for (; i < p; i += W) weigh_values<G, 1>(scores, v + i, pitch, n, least(p - i, W), y + i, y_pitch);
}

// One head of queries or keys, turned to its position and scaled.
static void turn_head(
    const AttentionStep& s, const float* cosine, const float* sine, float scale, const float* x, float* y) {
    each_vector(s.angles, [&](int64_t i, int64_t count) {
        const vf c = load_part(cosine + i, count) * splat(scale), si = load_part(sine + i, count) * splat(scale);
        const vf first = load_part(x + i, count), second = load_part(x + s.angles + i, count);
        store_part(y + i, first * c - second * si, count);
        store_part(y + s.angles + i, second * c + first * si, count);
    });
    const int64_t rest = 2 * s.angles;
    each_vector(s.p - rest, [&](int64_t i, int64_t count) {
        store_part(y + rest + i, load_part(x + rest + i, count) * splat(scale), count);
    });
}

// What a row's token sees, and by how much its position turns.
struct AttentionRow {
    int64_t seen;
    const float *k, *v;          // of the first token that it sees
    const float *cosine, *sine;  // [angles]
    int64_t pieces() const { return ceil_div(seen, PIECE); }
};

// A row's token goes to its slot. `turns` has 2 angles floats.
static AttentionRow enter_slot(
    const AttentionPart& a, const Passing& x, int64_t row, const float* projected, float* turns) {
    const AttentionStep& s = a.step;
    const int64_t p = s.p, pitch = s.kv_heads * p, position = a.position[x.rows.read(row)], text = x.rows.text_of(row);
    const int64_t slot = position - a.first[text], seen = s.seen(position);
    float *cosine = turns, *sine = turns + s.angles;
    // In double, as an angle counts modulo a turn.
    for (int64_t i = 0; i < s.angles; i++) cosine[i] = float(wrapped(double(position) * s.rates[i]));
    each_vector(s.angles, [&](int64_t i, int64_t count) {
        vf c, si;
        vsincos(load_part(cosine + i, count), &si, &c);
        store_part(cosine + i, c, count);
        store_part(sine + i, si, count);
    });
    float *k = a.k + (text * a.slots + slot) * pitch, *v = a.v + (text * a.slots + slot) * pitch;
    const float *key = projected + s.heads * p, *value = key + pitch;
    for (int64_t kv = 0; kv < s.kv_heads; kv++) turn_head(s, cosine, sine, 1.0f, key + kv * p, k + kv * p);
    copy(value, pitch, v);
    a.position[x.rows.written(row)] = position + 1;
    return {seen, k - (seen - 1) * pitch, v - (seen - 1) * pitch, cosine, sine};
}

// The heads of one group of a row, in one piece of what they see; to y[head of the group][y_pitch].
static void attend_group(
    const AttentionStep& s, const AttentionRow& row, int64_t kv, int64_t piece, const float* projected, float* y,
    int64_t y_pitch) {
    const int64_t group = s.group(), p = s.p, pitch = s.kv_heads * p, first = piece * PIECE;
    float* q = scratch<STEP_HEAD>(group * p);
    for (int64_t g = 0; g < group; g++)
        turn_head(s, row.cosine, row.sine, s.scale, projected + (kv * group + g) * p, q + g * p);
    const float *k = row.k + first * pitch + kv * p, *v = row.v + first * pitch + kv * p;
    const int64_t n = least(row.seen - first, PIECE);
    int64_t g = 0;
    for (; g + TOGETHER <= group; g += TOGETHER)
        attend_piece<TOGETHER>(q + g * p, k, v, pitch, n, p, y + g * y_pitch, y_pitch);
    for (; g + 2 <= group; g += 2) attend_piece<2>(q + g * p, k, v, pitch, n, p, y + g * y_pitch, y_pitch);
    if (g < group) attend_piece<1>(q + g * p, k, v, pitch, n, p, y + g * y_pitch, y_pitch);
}

// One head's output from what `pieces` of them have found, each [p] sums, largest score and sum of weights.
static void join_pieces(int64_t p, int64_t pieces, const float* found, float* y) {
    float largest = found[p], total = 0.0f;
    for (int64_t c = 1; c < pieces; c++) {
        const float own = found[c * (p + 2) + p];
        largest = own > largest ? own : largest;
    }
    clear(y, p);
    for (int64_t c = 0; c < pieces; c++, found += p + 2) {
        const float weight = vexp(splat(found[p] - largest))[0];
        total += weight * found[p + 1];
        each_vector(p, [&](int64_t i, int64_t count) {
            add_part(y + i, splat(weight) * load_part(found + i, count), count);
        });
    }
    const vf by = splat(1.0f / total);
    each_vector(p, [&](int64_t i, int64_t count) { store_part(y + i, load_part(y + i, count) * by, count); });
}

static void run_part(const AttentionPart& a, const Passing& x) {
    const AttentionStep& s = a.step;
    const int64_t wide = s.projected(), group = s.group();
    float* projected = scratch<DECODE_PROJECTED>(x.batch * wide);
    project_normed(a.in_proj, x, {projected, wide, false});
    float* turns = scratch<DECODE_SMALL>(x.batch * 2 * s.angles);
    AttentionRow* rows = (AttentionRow*)scratch<DECODE_CHOICES>(x.batch * sizeof(AttentionRow) / sizeof(float));
    int64_t most = 0, all = 0, work = 0;
    for (int64_t row = 0; row < x.batch; row++) {
        rows[row] = enter_slot(a, x, row, projected + row * wide, turns + row * 2 * s.angles);
        most = rows[row].pieces() > most ? rows[row].pieces() : most;
        all += rows[row].pieces();
        work += rows[row].seen * s.heads * s.p;
    }
    // [batch][heads][pieces][p + 2]
    const int64_t of_head = most * (s.p + 2), of_row = s.heads * of_head;
    float* found = scratch<DECODE_INNER>(x.batch * of_row);
    // Units are the groups of heads in a piece of a row, groups first, as slots have them side by side.
    auto attend = [&](int64_t begin, int64_t end) {
        for (int64_t row = 0; row < x.batch && end > 0; row++) {
            const int64_t units = rows[row].pieces() * s.kv_heads;
            for (int64_t unit = begin > 0 ? begin : 0; unit < least(end, units); unit++) {
                const int64_t kv = unit % s.kv_heads, piece = unit / s.kv_heads;
                attend_group(s, rows[row], kv, piece, projected + row * wide,
                             found + row * of_row + kv * group * of_head + piece * (s.p + 2), of_head);
            }
            begin -= units;
            end -= units;
        }
    };
    if (work < STEP_ALONE) attend(0, all * s.kv_heads);
    else parallel(all * s.kv_heads, attend);
    project(a.out_proj, x.batch, x.onto, [&](int64_t row, float* to) {
        for (int64_t head = 0; head < s.heads; head++)
            join_pieces(s.p, rows[row].pieces(), found + row * of_row + head * of_head, to + head * s.p);
    });
}

}  // namespace MK_ISA
