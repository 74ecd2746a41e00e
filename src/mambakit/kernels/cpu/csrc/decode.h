// A whole language model on one token of every row: embedding, parts, norm and head in one call.
//
// Rows may be tokens of one text that follow one another. Their logits are those of one call per token, to the last
// digit, while weights and large states are read once. Without rows, a call only writes again what is noted.
//
// All of it by one crew: a model is a hundred loops of some ten microseconds.
#pragma once

#include "part.h"
#include "part_attention.h"
#include "part_mamba.h"
#include "part_mlp.h"
#include "part_moe.h"

namespace MK_ISA {

struct DecodePart {
    MK_FIELDS(DecodePart,
        int64_t kind;       // as in run_part
        const void* block;  // Mamba1Part and so on
        Norm norm;
        float scale;
        bool beside;  // reads what the part before it read, without what that one added
    )
};

struct DecodeModel {
    MK_FIELDS(DecodeModel,
        int64_t width, parts;
        Matrix embedding;  // [vocabulary][width]
        const DecodePart* part;
        Norm norm_f;
        Matrix head;
        float embedding_scale, logits_scale;
    )
};

struct Decode {
    MK_FIELDS(Decode,
        const DecodeModel* model;
        int64_t batch;
        const int64_t *ids, *text;      // [batch]: a token, and the number of its text
        const int64_t *before, *after;  // [batch]: the places that it reads and writes
        const Run* run;                 // [runs], where rows have an order
        int64_t runs;
        const int64_t* again;  // places of notes
        bool stays;            // as in Rows
        float* logits;         // after these tokens, [batch][head.rows]
        int64_t* best;         // [batch]: the first of each row's largest, -1 if that is no finite number; or null
    )
};

static void run_part(const DecodePart& part, const Decode& call, const float* input, float* residual) {
    const Results onto = {residual, part.norm.width, true, part.scale};
    const Rows rows = {call.text, call.before, call.after, call.run, call.runs, call.again, call.stays};
    const Passing x = {part.norm, call.batch, input, onto, rows};
    if (!call.batch) {
        if (part.kind == 2) run_heads(*(const Mamba2Part*)part.block, x, nullptr, nullptr);
        if (part.kind == 3) run_heads(*(const Mamba3Part*)part.block, x, nullptr, nullptr);
        return;
    }
    if (part.kind == 1) run_part(*(const Mamba1Part*)part.block, x);
    if (part.kind == 2) run_part(*(const Mamba2Part*)part.block, x);
    if (part.kind == 3) run_part(*(const Mamba3Part*)part.block, x);
    if (part.kind == 4) run_part(*(const MlpPart*)part.block, x);
    if (part.kind == 5) run_part(*(const AttentionPart*)part.block, x);
    if (part.kind == 6) run_part(*(const MoePart*)part.block, x);
}

// Orders values, and of equal ones the first above others. What is no number comes first of all.
static uint64_t rank_of(float value, int64_t place) {
    if (value != value) return ~uint64_t(0);
    value += 0.0f;  // the two zeros are one
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 1u << 31;
    return (uint64_t)bits << 32 | (uint32_t)~place;
}

// The highest rank among x[begin], ..., x[end - 1].
static uint64_t best_rank(const float* x, int64_t begin, int64_t end) {
    vf largest = splat(-INFINITY);
    vi wrong = {};
    int64_t i = begin;
    for (; i + W <= end; i += W) {
        const vf part = load(x + i);
        largest = vmax(part, largest);
        wrong |= part != part;
    }
    const int64_t whole = i;
    uint64_t best = 0;
    for (; i < end; i++) {
        const uint64_t own = rank_of(x[i], i);
        best = own > best ? own : best;
    }
    float found = -INFINITY;
    for (int64_t lane = 0; lane < W; lane++) {
        if (wrong[lane]) return ~uint64_t(0);
        found = largest[lane] > found ? largest[lane] : found;
    }
    for (i = begin; i < whole; i++)
        if (x[i] == found) {
            const uint64_t own = rank_of(found, i);
            return own > best ? own : best;
        }
    return best;
}

// The head, and what is best among its results.
static void run_head(const Decode& call, const Passing& last) {
    const Matrix& head = call.model->head;
    const int64_t batch = call.batch, n = head.rows;
    const Results to = {call.logits, n, false, call.model->logits_scale};
    if (!call.best) return project_normed(head, last, to);
    clear(call.best, batch);
    over_rows(head, [&](int64_t begin, int64_t end) {
        multiply(head, begin, end, normed_rows(head, last), stored_columns(head), batch, to);
        for (int64_t row = 0; row < batch; row++) {
            const uint64_t own = best_rank(call.logits + row * n, begin, end);
            uint64_t* best = (uint64_t*)call.best + row;
            uint64_t so_far = __atomic_load_n(best, __ATOMIC_RELAXED);
            while (own > so_far && !__atomic_compare_exchange_n(best, &so_far, own, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
        }
    });
    for (int64_t row = 0; row < batch; row++) {
        const int64_t place = (uint32_t)~call.best[row];
        call.best[row] = call.best[row] != -1 && isfinite(call.logits[row * n + place]) ? place : -1;
    }
}

static void run_model(const Decode& call) {
    const DecodeModel& model = *call.model;
    const int64_t batch = call.batch, width = model.width;
    float* residual = scratch<DECODE_RESIDUAL>(batch * width);
    for (int64_t row = 0; row < batch; row++) {
        float* embedded = residual + row * width;
        read_row(model.embedding, call.ids[row], embedded);
        if (model.embedding_scale == 1.0f) continue;
        each_vector(width, [&](int64_t i, int64_t count) {
            store_part(embedded + i, splat(model.embedding_scale) * load_part(embedded + i, count), count);
        });
    }
    const float* input = residual;
    for (int64_t q = 0; q < model.parts; q++) {
        const bool shared = q + 1 < model.parts && model.part[q + 1].beside;
        if (!model.part[q].beside) {
            input = residual;
            if (shared) {
                float* kept = scratch<DECODE_INPUT>(batch * width);
                copy(residual, batch * width, kept);
                input = kept;
            }
        }
        run_part(model.part[q], call, input, residual);
    }
    if (!batch) return;
    run_head(call, {model.norm_f, batch, residual, {}, {}});
}

static void decode(const Decode& call) {
    with_crew([&] { run_model(call); });
}

}  // namespace MK_ISA
