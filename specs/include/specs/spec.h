/* SPDX-License-Identifier: MIT */
/*
 * spec.h: what a kernel is, as data. A kernel spec is a signature (what a problem fixes) plus an
 * algorithm (how the kernel does it) plus an arch. It is a flat value of 84 bytes without pointers:
 * copy it, compare it with spec_compare(), keep millions.
 *
 * Its 59 fields are listed once, in SPEC_FIELDS, in the order of the CSV columns; CSV, JSON,
 * filters, rules and names all work from that list. This build's own kernels may have more, each a trait of
 * FMHA_OWN_TRAITS (kernels/traits.h).
 */
#ifndef SPECS_SPEC_H
#define SPECS_SPEC_H

#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>
#include <kernels/traits.h>

#define SPEC_NAME_BYTES 256 /* canonical names, NUL included: a file name at most */
#define SPEC_N_COLUMNS  59  /* of all kernels' CSV */
#define SPEC_N_FIELDS   (SPEC_N_COLUMNS + N_OWN_TRAITS) /* of this build's */

/*
 * The vocabularies that programs depend on: X(ID, word). The order is the order of sorting. The
 * words that only data depends on (archs, pipelines, tile tags) are numbered by the catalog
 * instead.
 */
#define SPEC_DTYPES(X) /* inputs; "fp8bf16": fp8 inputs, bf16 output */                            \
	X(FP16, fp16)                                                                              \
	X(BF16, bf16)                                                                              \
	X(FP32, fp32)                                                                              \
	X(FP8, fp8)                                                                                \
	X(BF8, bf8)                                                                                \
	X(FP8FP16, fp8fp16)                                                                        \
	X(FP8BF16, fp8bf16)                                                                        \
	X(FP8FP32, fp8fp32)                                                                        \
	X(MXFP8, mxfp8)                                                                            \
	X(MXFP4, mxfp4)                                                                            \
	X(INT8, int8)

#define SPEC_MODES(X)    X(BATCH, batch) X(GROUP, group)
#define SPEC_VLAYOUTS(X) X(R, r) X(C, c)

/* top_left: causal and nothing else. generic: any band that struct fmha_problem can describe. */
#define SPEC_MASKS(X)                                                                              \
	X(NO, no) X(TOP_LEFT, top_left) X(BOTTOM_RIGHT, bottom_right) X(GENERIC, generic)

#define SPEC_BIASES(X) X(NO, no) X(BIAS, bias) X(ALIBI, alibi)

#define SPEC_QSCALES(X)                                                                            \
	X(NO, no) X(PERTENSOR, pertensor) X(BLOCKSCALE, blockscale) X(KV_BLOCKSCALE, kv_blockscale)

#define SPEC_ROPES(X)      X(NONE, none) X(INTERLEAVED, interleaved) X(HALF_ROTATED, half_rotated)
#define SPEC_KV_LAYOUTS(X) X(VECTORIZED, vectorized) X(LINEAR, linear)
#define SPEC_KV_LOOKUPS(X) X(SGLANG, sglang) X(VLLM, vllm)

/* The empty word means that the family has no dropout variants. p, rp: exhaustive mode only. */
#define SPEC_DROPOUTS(X)                                                                           \
	X(NONE, )                                                                                  \
	X(NO, no)                                                                                  \
	X(WG16, dropout_wg16)                                                                      \
	X(WG16_STORERANDVAL, dropout_wg16_storerandval)                                            \
	X(P, p)                                                                                    \
	X(RP, rp)

#define SPEC_ENUM_FAMILY(ID, ...)   SPEC_##ID,
#define SPEC_ENUM_DTYPE(ID, word)   SPEC_##ID,
#define SPEC_ENUM_MODE(ID, word)    SPEC_MODE_##ID,
#define SPEC_ENUM_VLAYOUT(ID, word) SPEC_VLAYOUT_##ID,
#define SPEC_ENUM_MASK(ID, word)    SPEC_MASK_##ID,
#define SPEC_ENUM_BIAS(ID, word)    SPEC_BIAS_##ID,
#define SPEC_ENUM_QSCALE(ID, word)  SPEC_QSCALE_##ID,
#define SPEC_ENUM_ROPE(ID, word)    SPEC_ROPE_##ID,
#define SPEC_ENUM_LAYOUT(ID, word)  SPEC_KV_##ID,
#define SPEC_ENUM_LOOKUP(ID, word)  SPEC_KV_##ID,
#define SPEC_ENUM_DROPOUT(ID, word) SPEC_DROPOUT_##ID,
enum spec_family { ABI_FAMILIES(SPEC_ENUM_FAMILY) SPEC_N_FAMILIES };
enum spec_dtype { SPEC_DTYPES(SPEC_ENUM_DTYPE) SPEC_N_DTYPES };
enum spec_mode { SPEC_MODES(SPEC_ENUM_MODE) SPEC_N_MODES };
enum spec_vlayout { SPEC_VLAYOUTS(SPEC_ENUM_VLAYOUT) SPEC_N_VLAYOUTS };
enum spec_mask { SPEC_MASKS(SPEC_ENUM_MASK) SPEC_N_MASKS };
enum spec_bias { SPEC_BIASES(SPEC_ENUM_BIAS) SPEC_N_BIASES };
enum spec_qscale { SPEC_QSCALES(SPEC_ENUM_QSCALE) SPEC_N_QSCALES };
enum spec_rope { SPEC_ROPES(SPEC_ENUM_ROPE) SPEC_N_ROPES };
enum spec_kv_layout { SPEC_KV_LAYOUTS(SPEC_ENUM_LAYOUT) SPEC_N_KV_LAYOUTS };
enum spec_kv_lookup { SPEC_KV_LOOKUPS(SPEC_ENUM_LOOKUP) SPEC_N_KV_LOOKUPS };
enum spec_dropout { SPEC_DROPOUTS(SPEC_ENUM_DROPOUT) SPEC_N_DROPOUTS };

/* The third value of a pad: the length is a multiple of 8, not of the tile. */
#define SPEC_PAD_8 8

/*
 * The compile-time traits that a problem implies. Set one up with spec_signature_init(): page_size
 * starts at 1, lse and others at 0. spec_signature_reduce() then drops what a family has no use
 * for.
 */
struct kernel_signature {
	uint16_t hdim_q, hdim_v;
	uint16_t page_size;        /* 1: not specialised on it */
	uint8_t family;            /* enum spec_family */
	uint8_t data_type;         /* enum spec_dtype */
	uint8_t mode;              /* enum spec_mode */
	uint8_t vlayout;           /* enum spec_vlayout */
	uint8_t mask;              /* enum spec_mask */
	uint8_t bias;              /* enum spec_bias */
	uint8_t lse;               /* 0, 1 */
	uint8_t dropout;           /* 0, 1 */
	uint8_t qscale;            /* enum spec_qscale */
	uint8_t rope;              /* enum spec_rope */
	uint8_t logits;            /* 0, 1: soft cap */
	uint8_t paged_kv;          /* 0, 1 */
	uint8_t sink;              /* 0, 1 */
	uint8_t skip_min_seqlen_q; /* 0, 1 */
	uint8_t kv_memory_layout;  /* enum spec_kv_layout */
	uint8_t kv_lookup_table;   /* enum spec_kv_lookup */
	uint8_t deterministic;     /* 0, 1 */
	uint8_t dbias;             /* 0, 1 */
	uint8_t dropout_variant;   /* enum spec_dropout */
#define SPEC_OWN_MEMBER(name, NAME, word, kind, families, asked) uint8_t name;
	FMHA_OWN_TRAITS(SPEC_OWN_MEMBER)
#undef SPEC_OWN_MEMBER
	uint8_t reserved[1 + N_OWN_TRAITS % 2]; /* 0 */
};

/* The choice of a tile generator: block tile, waves, warp tiles. Stage 0: S = QK, 1: O = PV. */
struct kernel_tile {
	uint16_t tile_m0, tile_n0, tile_k0, tile_n1, tile_k1, tile_k0max;
	uint16_t tile_bwd6, tile_bwd7, tile_bwd8; /* bwd_dq_dk_dv only, else 0 */
	uint16_t warp_m0, warp_n0, warp_k0;
	uint16_t warp_m1, warp_n1, warp_k1;
	uint16_t warp_m2, warp_n2, warp_k2;
	uint8_t wave_m0, wave_n0, wave_k0;
	uint8_t wave_m1, wave_n1, wave_k1;
	uint8_t wave_m2, wave_n2, wave_k2;
	uint8_t tile_tag;   /* catalog word */
	uint8_t use_trload; /* 0, 1 */
	uint8_t reserved;   /* 0 */
};

struct kernel_spec {
	struct kernel_signature signature;
	struct kernel_tile tile;
	int16_t block_per_cu; /* -1: the compiler decides */
	uint8_t num_wave_groups;
	uint8_t pad_s,
		pad_sk; /* 0, 1 or SPEC_PAD_8. 1: the kernel handles lengths that its tile does */
	uint8_t pad_d, pad_dv; /* not divide: seqlen_q, seqlen_k, hdim_q, hdim_v in this order */
	uint8_t pipeline;      /* catalog word */
	uint8_t gfx_arch;      /* catalog word */
	uint8_t reserved;      /* 0 */
};

/* A stage's waves (@word: wave), or the tile of one (warp), along m, n and k. */
#define SPEC_WAVE_FIELDS(X, word, stage)                                                           \
	X(word##_m##stage, tile.word##_m##stage, INT)                                              \
	X(word##_n##stage, tile.word##_n##stage, INT)                                              \
	X(word##_k##stage, tile.word##_k##stage, INT)

/*
 * X(name, member, kind): kind WORD has a vocabulary; FLAG is 0 or 1, printed so; PAD is 0, 1, 8;
 * INT is a number. The order is the CSV's and never changes.
 */
#define SPEC_FIELDS(X)                                                                             \
	X(family, signature.family, WORD)                                                          \
	X(data_type, signature.data_type, WORD)                                                    \
	X(mode, signature.mode, WORD)                                                              \
	X(vlayout, signature.vlayout, WORD)                                                        \
	X(hdim_q, signature.hdim_q, INT)                                                           \
	X(hdim_v, signature.hdim_v, INT)                                                           \
	X(gfx_arch, gfx_arch, WORD)                                                                \
	X(tile_m0, tile.tile_m0, INT)                                                              \
	X(tile_n0, tile.tile_n0, INT)                                                              \
	X(tile_k0, tile.tile_k0, INT)                                                              \
	X(tile_n1, tile.tile_n1, INT)                                                              \
	X(tile_k1, tile.tile_k1, INT)                                                              \
	X(tile_k0max, tile.tile_k0max, INT)                                                        \
	X(tile_bwd6, tile.tile_bwd6, INT)                                                          \
	X(tile_bwd7, tile.tile_bwd7, INT)                                                          \
	X(tile_bwd8, tile.tile_bwd8, INT)                                                          \
	SPEC_WAVE_FIELDS(X, wave, 0)                                                               \
	SPEC_WAVE_FIELDS(X, wave, 1)                                                               \
	SPEC_WAVE_FIELDS(X, wave, 2)                                                               \
	SPEC_WAVE_FIELDS(X, warp, 0)                                                               \
	SPEC_WAVE_FIELDS(X, warp, 1)                                                               \
	SPEC_WAVE_FIELDS(X, warp, 2)                                                               \
	X(pad_s, pad_s, PAD)                                                                       \
	X(pad_sk, pad_sk, PAD)                                                                     \
	X(pad_d, pad_d, PAD)                                                                       \
	X(pad_dv, pad_dv, PAD)                                                                     \
	X(pipeline, pipeline, WORD)                                                                \
	X(block_per_cu, block_per_cu, INT)                                                         \
	X(num_wave_groups, num_wave_groups, INT)                                                   \
	X(mask, signature.mask, WORD)                                                              \
	X(bias, signature.bias, WORD)                                                              \
	X(lse, signature.lse, FLAG)                                                                \
	X(dropout, signature.dropout, FLAG)                                                        \
	X(qscale, signature.qscale, WORD)                                                          \
	X(rope, signature.rope, WORD)                                                              \
	X(logits, signature.logits, FLAG)                                                          \
	X(paged_kv, signature.paged_kv, FLAG)                                                      \
	X(sink, signature.sink, FLAG)                                                              \
	X(skip_min_seqlen_q, signature.skip_min_seqlen_q, FLAG)                                    \
	X(page_size, signature.page_size, INT)                                                     \
	X(kv_memory_layout, signature.kv_memory_layout, WORD)                                      \
	X(kv_lookup_table, signature.kv_lookup_table, WORD)                                        \
	X(deterministic, signature.deterministic, FLAG)                                            \
	X(dbias, signature.dbias, FLAG)                                                            \
	X(dropout_variant, signature.dropout_variant, WORD)                                        \
	X(tile_tag, tile.tile_tag, WORD)                                                           \
	X(use_trload, tile.use_trload, FLAG)

enum spec_field {
#define SPEC_ENUM_FIELD(name, member, kind)                    SPEC_FIELD_##name,
#define SPEC_ENUM_OWN(name, NAME, word, kind, families, asked) SPEC_FIELD_##name,
	SPEC_FIELDS(SPEC_ENUM_FIELD) FMHA_OWN_TRAITS(SPEC_ENUM_OWN)
#undef SPEC_ENUM_FIELD
#undef SPEC_ENUM_OWN
};

struct spec_catalog;

/* The default value of every field (arch and pipeline: word 0 of the catalog). */
void spec_init(struct kernel_spec *spec);
void spec_signature_init(struct kernel_signature *signature);

/* Field access by number, for code that works on all fields alike. */
const char *spec_field_name(enum spec_field field);
int64_t spec_get(const struct kernel_spec *spec, enum spec_field field);
/* Is it of the signature? */
int spec_field_is_trait(enum spec_field field);
void spec_set(struct kernel_spec *spec, enum spec_field field, int64_t value);

/* The words of a field; NULL when the field has no vocabulary or @value is not in it. */
const char *spec_word(const struct spec_catalog *catalog, enum spec_field field, int64_t value);
/* Returns the word's number, or -1. */
int spec_word_find(const struct spec_catalog *catalog, enum spec_field field, const char *word);

/*
 * The canonical name, such as
 *   fwd-bf16-group-h192x128-qr_async-t128x128x32x128x32x256-r4x1x1-w32x32x16-p1111-top_left-no-lse-gfx950
 *   fwd-bf16-h128-gpu_wgmma-t128x128x128x128x128x128-r8x1x1-w16x16x16-p1111-generic-no-bpc1-sm_90a
 * It carries all 59 fields, leaving out what has its default value, so it is unique over everything
 * that can be enumerated. This build's own kernels, the second, have one name for one piece of code: it
 * says what is compiled in, and has no mode, since they take both. The parts are joined by '-', which
 * no word contains:
 *   family, dtype, mode, h<hdim_q>[x<hdim_v>], pipeline,
 *   t<m0>x<n0>x<k0>x<n1>x<k1>x<k0max>[x<bwd6>x<bwd7>x<bwd8>][.<tile_tag>],
 *   r<waves of stage 0>[.<stage 1>[.<stage 2>]], w<warp tile of stage 0>[.<stage 1>[.<stage 2>]]
 *     (stage 2 is left out when it is 1x1x1 or 16x16x16, stage 1 too when it then equals stage 0),
 *   p<pad_s><pad_sk><pad_d><pad_dv>, mask, bias,
 *   then in this order, each only when it is not the default: lse, drop, cap, sink, skip,
 *     qs.<qscale>, paged, rope.<rope>, ps<page_size>, kvl.<layout>, kvt.<lookup>, det, dbias,
 *     drv.<variant>, trload, bpc<n>, nwg<n>, v.<vlayout>, and the words of traits of this build's own,
 *   last the arch.
 * Returns the length; 0 when it would not fit, which validation reports as an error.
 */
size_t spec_name_format(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			char name[SPEC_NAME_BYTES]);

/*
 * The inverse. Only canonical names are accepted, so that a kernel has one name, and those that this build's
 * own had when a name was of a problem: spec_reduce() (specs/backend.h) makes the kernel's of such a spec.
 * Returns 0 or FMHA_EINVAL with the offending part in @err.
 */
int spec_name_parse(const struct spec_catalog *catalog, const char *name,
		    struct kernel_spec *ret_spec, struct fmha_error *err);

/* A total order: field by field in the order of the columns (words by number). */
int spec_compare(const struct kernel_spec *a, const struct kernel_spec *b);
uint64_t spec_hash(const struct kernel_spec *spec);
uint64_t spec_signature_hash(const struct kernel_signature *signature);
int spec_signature_equal(const struct kernel_signature *a, const struct kernel_signature *b);

#endif
