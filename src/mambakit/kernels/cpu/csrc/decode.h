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
    const Passing last = {model.norm_f, batch, residual, {}, {}};
    project_normed(model.head, last, {call.logits, model.head.rows, false, model.logits_scale});
}

static void decode(const Decode& call) {
    with_crew([&] { run_model(call); });
}

}  // namespace MK_ISA
