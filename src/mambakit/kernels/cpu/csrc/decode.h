// A whole language model on one token of every row: embedding, parts, norm and head in one call.
//
// Rows may be tokens of one text that follow one another: each reads the states that the one before it wrote. Their
// logits are those of one call per token, to the last digit, while the weights are read once.
//
// Two to four parallel regions per part, since each costs microseconds.
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
        const float* embedding;  // [vocabulary][width]
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
        const int64_t *before, *after;  // [batch]: the states that it reads and writes, of those of each part
        float* logits;                  // after these tokens, [batch][head.rows]
    )
};

static void run_part(const DecodePart& part, const Decode& call, bool in_order, const float* input, float* residual) {
    const Results onto = {residual, part.norm.width, true, part.scale};
    const Passing x = {part.norm, call.batch, input, onto, {call.before, call.after, in_order}, call.text};
    if (part.kind == 1) run_part(*(const Mamba1Part*)part.block, x);
    if (part.kind == 2) run_part(*(const Mamba2Part*)part.block, x);
    if (part.kind == 3) run_part(*(const Mamba3Part*)part.block, x);
    if (part.kind == 4) run_part(*(const MlpPart*)part.block, x);
    if (part.kind == 5) run_part(*(const AttentionPart*)part.block, x);
    if (part.kind == 6) run_part(*(const MoePart*)part.block, x);
}

static void decode(const Decode& call) {
    const DecodeModel& model = *call.model;
    const int64_t batch = call.batch, width = model.width;
    float* residual = scratch<DECODE_RESIDUAL>(batch * width);
    for (int64_t row = 0; row < batch; row++) {
        const float* embedded = model.embedding + call.ids[row] * width;
        each_vector(width, [&](int64_t i, int64_t count) {
            store_part(residual + row * width + i, splat(model.embedding_scale) * load_part(embedded + i, count), count);
        });
    }
    bool in_order = false;
    for (int64_t row = 0; row < batch; row++) in_order |= call.before[row] != call.after[row];
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
        run_part(model.part[q], call, in_order, input, residual);
    }
    const Passing last = {model.norm_f, batch, residual, {}, {}, nullptr};
    project_normed(model.head, last, {call.logits, model.head.rows, false, model.logits_scale});
}

}  // namespace MK_ISA
