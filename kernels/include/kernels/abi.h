/* SPDX-License-Identifier: MIT */
/*
 * abi.h: the argument structs that host and device code share. A kernel takes exactly one of them,
 * by value. No includes, so that hipRTC, NVRTC, clang and gcc all read the same bytes: every field
 * has the same size and offset on the host and on every device.
 *
 * Strides are int64 in elements, lengths int32, pointers 8 bytes. Tensors are always addressed as
 * (batch, seq, head, dim); in group mode the batch stride is unused, the sequence axis is the
 * packed one and sequence b starts at seqstart[b]. Whoever fills these structs has checked every
 * extent; kernels trust them, except for data that lives in client memory (page tables, lengths),
 * which the host hands over as private validated copies on the CPU and which GPU kernels clamp.
 */
#ifndef FMHA_KERNELS_ABI_H
#define FMHA_KERNELS_ABI_H

typedef int abi_i32;
typedef unsigned int abi_u32;
typedef long long abi_i64;
typedef unsigned long long abi_u64;

/* The values equal enum fmha_dtype, fmha_mask, ... of the problem; dispatch asserts it. */
#define ABI_DTYPES(X)                                                                              \
	X(F32, f32)                                                                                \
	X(F16, f16)                                                                                \
	X(BF16, bf16) X(E4M3, e4m3) X(E5M2, e5m2) X(I32, i32) X(U8, u8) X(I64, i64) X(I8, i8)
#define ABI_ENUM(NAME, name) ABI_##NAME,
#define ABI_WORD(NAME, name) #name,
enum abi_dtype { ABI_DTYPES(ABI_ENUM) };
enum abi_mask { ABI_MASK_NONE, ABI_MASK_TOP_LEFT, ABI_MASK_BOTTOM_RIGHT };
enum abi_rope { ABI_ROPE_NONE, ABI_ROPE_INTERLEAVED, ABI_ROPE_HALF_ROTATED };
enum abi_kv_layout { ABI_KV_LINEAR, ABI_KV_VECTORIZED, ABI_KV_LATENT_FP8 };

/* A key of ABI_KV_LATENT_FP8: so many elements of e4m3, an f32 factor for each ABI_LATENT_BLOCK of them, the
 * rest of hdim_q as bf16. Strides count bytes. */
#define ABI_LATENT_BYTES   656
#define ABI_LATENT_CODES   512
#define ABI_LATENT_BLOCK   128
#define ABI_LATENT_FACTORS ABI_LATENT_CODES /* bytes from the key's first */
#define ABI_LATENT_REST    (ABI_LATENT_FACTORS + ABI_LATENT_CODES / ABI_LATENT_BLOCK * 4)

/*
 * X(NAME, name, args): the nine kernel families, whose kernels take a struct abi_ARGS_args. Code is compiled
 * with their numbers: others go to the end.
 */
#define ABI_FAMILIES(X)                                                                            \
	X(FWD, fwd, fwd)                                                                           \
	X(FWD_SPLITKV, fwd_splitkv, fwd)                                                           \
	X(FWD_SPLITKV_COMBINE, fwd_splitkv_combine, combine)                                       \
	X(FWD_PAGEDKV, fwd_pagedkv, fwd)                                                           \
	X(FWD_APPENDKV, fwd_appendkv, appendkv)                                                    \
	X(BATCH_PREFILL, batch_prefill, fwd)                                                       \
	X(BWD_DOT_DO_O, bwd_dot_do_o, bwd)                                                         \
	X(BWD_DQ_DK_DV, bwd_dq_dk_dv, bwd)                                                         \
	X(BWD_CONVERT_DQ, bwd_convert_dq, bwd)
#define ABI_FAMILY_ENUM(NAME, name, args) ABI_##NAME,
#define ABI_FAMILY_WORD(NAME, name, args) #name,
enum abi_family { ABI_FAMILIES(ABI_FAMILY_ENUM) ABI_N_FAMILIES };

/* data == 0: absent. Over (row, column): stride_seq is for rows, stride_dim for columns. */
struct abi_tensor {
	void *data;
	abi_i64 stride_batch, stride_seq, stride_head, stride_dim; /* elements */
};

/* Row statistics, f32: element (b, h, i) at
 * data[b * stride_batch + h * stride_head + i * stride_seq];
 * group mode: i counts along the packed axis. */
struct abi_rows {
	float *data;
	abi_i64 stride_batch, stride_head, stride_seq;
};

/* Scale factors of 8 bits: data[b * stride_batch + h * stride_head + (i / block) * stride_block];
 * block 0: one factor for all i. Per page (k, v only): the page number takes the place of b, and i is
 * the slot within the page. */
struct abi_descale {
	const float *data; /* 0: factor 1 */
	abi_i64 stride_batch, stride_head, stride_block;
	abi_i32 block;
	abi_i32 per_page;
};

/* Where each sequence lies and how long it is. */
struct abi_sequences {
	const abi_i32 *seqstart_q; /* [batch + 1], group mode; 0: batch mode */
	const abi_i32 *seqstart_k; /* [batch + 1], group mode; 0 with a paged or indexed cache */
	const abi_i32 *seqlen_q;   /* [batch] or 0: physical lengths */
	const abi_i32 *seqlen_k;   /* [batch] or 0: physical lengths */
	const abi_i32 *leftpad_k;  /* [batch] or 0: the first leftpad_k keys do not exist; column j
				    * of the mask counts from the first real key, and seqlen_k counts
				    * the padding too */
	abi_i32 batch;
	abi_i32 seqlen_q_max; /* batch mode: the physical length */
	abi_i32 seqlen_k_max; /* batch mode: the physical length or the cache's capacity */
	abi_i32 total_q;      /* length of the packed q axis; batch mode: batch * seqlen_q_max */
	abi_i32 total_k;      /* length of the packed k axis; batch mode: batch * seqlen_k_max */
	abi_i32 reserved;
};

/* The cache of keys and values. One of: contiguous (page_size 0), block_table, kv_indptr. */
struct abi_kv_cache {
	const abi_i32 *block_table; /* [batch, >= ceil(seqlen_k / page_size)] */
	abi_i64 block_table_stride;
	const abi_i32 *kv_indptr; /* [batch + 1] into kv_page_indices */
	const abi_i32 *kv_page_indices;
	const abi_i32 *kv_last_page_len; /* [batch]: seqlen_k = (pages - 1) * page_size + this */
	const abi_i32 *cache_batch_idx; /* [batch] or 0; contiguous caches: row of k and v to use */
	abi_i32 page_size;              /* keys; 0: contiguous */
	abi_i32 n_pages;                /* page numbers are below this */
	abi_i32 layout;                 /* enum abi_kv_layout; vectorized: k and v are packed */
	/* Bounds for GPU kernels, which read the indices above from client memory; 0: not known. */
	abi_i32 max_blocks;     /* columns of block_table */
	abi_i32 n_page_indices; /* length of kv_page_indices */
	abi_i32 cache_batch;    /* rows of a contiguous cache under cache_batch_idx */
};

struct abi_band {
	abi_i32 mask;         /* enum abi_mask: the anchor */
	abi_i32 window_left;  /* -1: unlimited */
	abi_i32 window_right; /* -1: unlimited */
	abi_i32 sink_tokens;  /* leading columns visible left of the window */
};

/*
 * A mask as data, read where its owner has it and may write it at any time: nothing in it is trusted. A
 * row sees column j when the band lets it and, with intervals, when j < F0 or F(2n - 1) <= j < F(2n) for
 * some n, endpoint e being i32 element (b, head, row, e); with bits, when bit j % 8 of u8 element
 * (b, head, row, j / 8) is set. Columns count as in the band. One of the two at most is there.
 */
struct abi_mask_data {
	struct abi_tensor intervals, bits;
	abi_i32 n_endpoints; /* odd */
	abi_i32 reserved;
};

/*
 * The keys of each row, where they are chosen: entry e of row i is data[b * stride_batch + i * stride_seq + e
 * * stride_entry], read where its owner has it and may write it at any time: nothing in it is trusted. It is a
 * position of the sequence or, in pages that no table leads to, a slot; one that is none is left out. The row
 * has a column for each entry, and no mask.
 */
struct abi_chosen {
	const abi_i32 *data; /* 0: every row has all keys */
	abi_i64 stride_batch, stride_seq, stride_entry;
	abi_i32 n;
	abi_i32 are_slots;
};

struct abi_dropout {
	abi_u64 seed, offset;
	/* GPU: words that are added to the two; 0: nothing to add. */
	const abi_u64 *seed_at, *offset_at;
	float p_drop;         /* 0: no dropout */
	float p_keep_inverse; /* 1 / (1 - p_drop) */
	abi_i32 keep_at_most; /* keep a byte <= floor(255 * (1 - p_drop)) */
	abi_i32 row_block;    /* rows count from 16 times this, columns from 32 times the next */
	abi_i32 column_block;
	abi_i32 reserved;
	struct abi_tensor randval; /* u8 (b, head, row, column) or absent */
};

/* ABI_FWD, ABI_FWD_SPLITKV, ABI_FWD_PAGEDKV, ABI_BATCH_PREFILL */
/* The last tiles of an unsplit problem, where they are too few for all blocks, each in parts: so many splits of the
 * keys. The block whose part comes last adds them up. For loops that know it alone. */
struct abi_rest {
	float *parts;      /* ABI_PART_FLOATS() each, of the kernel's tile */
	abi_u32 *arrivals; /* zero; of each tile's waves */
	abi_i32 n_parts;   /* that there is room for; where there would be more nothing is cut */
	abi_i32 n_splits;  /* a tile's; 0: nothing is cut */
};
/* O as registers have it, and what a lane knows of its rows. */
#define ABI_PART_FLOATS(rows, hdim_v) ((abi_i64)(rows) * ((hdim_v) + 8))

struct abi_fwd_args {
	struct abi_tensor q, k, v, o; /* linear pages: stride_batch is the page's stride */
	struct abi_rows lse;          /* absent: not wanted */
	struct abi_tensor bias;       /* (b, head, row, column); stride 0 broadcasts */
	const float *alibi_slopes;    /* adds -slope * |i + seqlen_k - seqlen_q - j|; 0: none */
	abi_i64 alibi_stride_batch;
	const float *sink; /* [nhead_q] or 0; with n_splits > 0 the combine adds it */
	struct abi_descale q_descale, k_descale, v_descale;
	struct abi_sequences sequences;
	struct abi_kv_cache cache;
	struct abi_band band;
	struct abi_mask_data mask_data;
	struct abi_dropout dropout;
	/* Split-KV: split s sees columns [s * split_size, (s + 1) * split_size). Partials, f32:
	 * o_acc [n_splits, nhead_q, total_q, hdim_v], normalised within the split;
	 * lse_acc [n_splits, nhead_q, total_q], -inf for an empty split. o and lse are not written.
	 * split_size 0: blocks divide all keys among themselves, so that a row is in parts of any size, at most
	 * n_splits (2 and more) of them; those that it does not have are empty. For loops that know it alone.
	 */
	float *o_acc, *lse_acc;
	abi_i32 n_splits;   /* 0: not split */
	abi_i32 split_size; /* keys */
	abi_i32 nhead_q, nhead_k, hdim_q, hdim_v;
	abi_i32 min_seqlen_q; /* shorter sequences are skipped, O and LSE untouched; 0: none */
	float scale;
	float logits_soft_cap; /* 0: none */
	abi_i32 dtype;         /* of q, k, v: enum abi_dtype */
	abi_i32 o_dtype;
	abi_i32 bias_dtype;
	abi_i32 kv_dtype; /* of k and v under a 16-bit q: ABI_E4M3, ABI_E5M2 or ABI_I8; 0: dtype */
	abi_i32 v_in_k;   /* v is where k is: its first hdim_v elements, with its factors */
	struct abi_chosen chosen;
	struct abi_rest rest;
};

/* ABI_FWD_SPLITKV_COMBINE and merge_states: O = sum_s w_s O_s, w_s = exp(LSE_s - LSE). */
struct abi_combine_args {
	struct abi_tensor o_parts; /* + split * o_parts_stride_split; o_parts_dtype */
	abi_i64 o_parts_stride_split;
	struct abi_rows lse_parts; /* + split * lse_parts_stride_split */
	abi_i64 lse_parts_stride_split;
	struct abi_tensor o;
	struct abi_rows lse; /* absent: not wanted */
	const float *sink;   /* [nhead_q] or 0 */
	struct abi_sequences sequences;
	abi_i32 n_splits;
	abi_i32 nhead_q, hdim_v;
	abi_i32 min_seqlen_q;
	abi_i32 o_parts_dtype, o_dtype;
	abi_i32 few_rows; /* that most sequences have at most; 0: they are like the longest one */
	abi_i32 in_order; /* 1: a row's parts are added one by one, whatever else is merged */
};

/* ABI_FWD_APPENDKV: row i of k_new goes to position seqlen_k[b] + i of the cache, rotated there;
 * the rows of q are rotated by position seqlen_k[b] + i (a causal or windowed problem) or all by
 * seqlen_k[b]. By slots, row i goes to slots[b][i] of the pages and turns, as row i of q does, by
 * positions[b][i]: 64-bit integers of clients, which kernels read once a row; a slot that the cache has
 * not is left out. */
struct abi_appendkv_args {
	struct abi_tensor q, q_rotated; /* absent: q is not rotated */
	struct abi_tensor k_new, v_new;
	struct abi_tensor k, v; /* the cache, written; no v: values are in k */
	/* stride_seq, stride_dim: [max_pos, rotary_dim / 2] */
	struct abi_tensor rotary_cos, rotary_sin;
	/* seqlen_k: lengths BEFORE the append; 0: all seqlen_k_max - seqlen_new */
	struct abi_sequences sequences;
	struct abi_kv_cache cache;
	abi_i32 seqlen_new;
	abi_i32 rope, rotary_dim, rotary_max_pos;
	abi_i32 q_rows_same_position; /* 1: every row of q has position seqlen_k[b] */
	abi_i32 nhead_q, nhead_k, hdim_q, hdim_v;
	abi_i32 dtype;        /* of the cache, and of every tensor but the rotary tables */
	abi_i32 rotary_dtype; /* ABI_F32 or dtype */
	abi_i32 new_dtype; /* of k_new, v_new and q over a cache of 8 bits: ABI_F16, ABI_BF16; 0: dtype */
	abi_i32 computes_descale; /* factors of slots are found and written */
	/* 1: the other way round, GPU: the keys that the cache has, seqlen_k of them, go to k_new and v_new,
	 * of new_dtype, in bf16 times k_descale and v_descale where these are there. seqlen_new is how many there are
	 * at most. */
	abi_i32 widens;
	struct abi_descale k_descale; /* what new rows are divided by, where new_dtype is */
	struct abi_descale v_descale;
	const abi_i64 *slots; /* 0: by lengths */
	abi_i64 slots_stride_batch, slots_stride_seq;
	const abi_i64 *positions; /* 0: no rope, or by lengths */
	abi_i64 positions_stride_batch, positions_stride_seq;
	/* widens: sequences of up to so many rows stay as they are; if k_new and v_new have not as many places
	 * as there are others, which are n_places, of up to twice as many, and so on. 0: none stays, each has
	 * the place of its number. Then it is written who does: [batch] each, rows of a sequence that stays, of
	 * one that is widened, and its place. */
	abi_i32 few_rows, n_places;
	abi_i32 *rows_kept, *rows_widened, *places;
};

/* A block that owns keys, under a mask that is intervals: which ones, and which rows see some of them. */
struct abi_key_block {
	abi_i32 number; /* of the sequence's blocks */
	abi_i32 first_row, end_row;
};

/*
 * ABI_BWD_*. The three stages share one struct and one workspace:
 *   head: nsplits int32 [batch where it is deterministic in group mode, else 1], rounded up to
 *         16 bytes;
 *         group mode: dq_acc_offsets int64 [batch + 1], in elements, rounded up to 16 bytes;
 *   data: dq_acc f32, a sequence [nhead_q, nsplits_i, seqlen_q_i (physical, with padding), hdim_q],
 *         or [nhead_q, tiles_i], tiles as the stage has them: dq_acc.h says how large either is;
 *         with kv_parts above 1 kv_acc f32: rows of dK, [nhead_k, kv_parts, total_k, hdim_q], then as many of dV.
 * dot_do_o writes d = rowsum(dO * O) - dlse, and dsink where asked, on GPUs zeros in dBias at
 * columns without a key too; dq_dk_dv writes dK, dV, dBias and either dQ or partial sums in dq_acc; convert_dq sums the splits, in order, scales and rounds,
 * and so it does with the parts of dK and dV.
 */
struct abi_bwd_args {
	struct abi_tensor q, k, v, o, d_o;
	struct abi_tensor dq, dk, dv; /* dk, dv over nhead_k: summed over the heads of a group */
	struct abi_tensor bias, dbias;
	struct abi_rows lse;
	struct abi_rows d;    /* in the workspace, before dq_acc */
	struct abi_rows dlse; /* data 0: none */
	const float *alibi_slopes;
	abi_i64 alibi_stride_batch;
	const float *sink;
	float *dsink; /* [nhead_q]: -sum over rows of exp(sink - LSE) * d */
	struct abi_sequences sequences;
	struct abi_band band;
	struct abi_mask_data mask_data;
	struct abi_dropout dropout;
	const abi_i32 *nsplits;        /* workspace head */
	const abi_i64 *dq_acc_offsets; /* workspace head; 0 in batch mode */
	float *dq_acc;                 /* 0: dq_dk_dv writes dQ directly */
	abi_i32 nhead_q, nhead_k, hdim_q, hdim_v;
	abi_i32 deterministic;
	float scale;
	float logits_soft_cap;
	abi_i32 dtype;
	abi_i32 bias_dtype;
	/* dq_acc in tiles of so many rows, of so many elements each; 0: row by row */
	abi_i32 dq_tile_rows, dq_tile_floats;
	abi_i32 dq_split_keys; /* keys that share a split of dq_acc, ceil(seqlen_k_i / them) splits at least; 0: all */
	/* Above 1: so many parts has a group of heads, of as many heads one after the other, and each has sums of
	 * dK and dV of its own, which convert_dq adds. For loops that know it alone. */
	abi_i32 kv_parts;
	/* Above 0: so many words before d dot_do_o writes in which order blocks that own keys begin, lists of struct
	 * abi_key_block, for dq_dk_dv. Its owner may write it, too: nothing in it is trusted. */
	abi_i32 order_words;
	float *kv_acc; /* 0: dq_dk_dv writes dK and dV */
};

/* A list of integers as its owner has it: element i at data[i * stride]; 0: absent. */
struct abi_words {
	const abi_i32 *data;
	abi_i64 stride;
};

/*
 * Tables of a problem, made on the GPU out of integer tensors that nobody has judged (prepare.h):
 * what sequences and cache point to is written, cut so that no content leads outside of the
 * problem's tensors; so is the head of a backward workspace.
 */
struct abi_prepare_args {
	struct abi_words seqstart_q, seqstart_k, seqlen_q, seqlen_k, leftpad_k;
	struct abi_words kv_indptr, kv_page_indices, kv_last_page_len, cache_batch_idx;
	struct abi_words block_table; /* stride: of its columns */
	abi_i64 block_table_stride_row;
	struct abi_sequences sequences; /* seqlen_k: after the append */
	struct abi_kv_cache cache;
	abi_i32 *seqlen_k_before; /* of the append; 0 where sequences.seqlen_k is */
	abi_i32 *nsplits;         /* 0: no backward head */
	abi_i64 *dq_acc_offsets;
	abi_i32 table_rows;      /* of the block table: 1 when all sequences share one */
	abi_i32 seqlen_new;      /* keys that an append adds; 0: none */
	abi_i32 dq_splits;       /* the most of a sequence */
	abi_i32 dq_tile_n0;      /* keys a split; 0: every sequence has dq_splits */
	abi_i32 nsplits_entries; /* batch, or 1: one for all */
	abi_i32 nhead_q, hdim_q;
	abi_i32 dq_tile_rows, dq_tile_floats; /* as in abi_bwd_args */
	abi_i32 grid;                         /* blocks */
	abi_i32 keys_alone; /* 1: of sequences nothing is made but lengths of keys, each of its own */
};

/* A word that a stream waits for, until it is @value or was further on, or writes. */
struct abi_word_args {
	abi_u32 *word;
	abi_u32 value;
	abi_i32 writes;
};

union abi_args {
	struct abi_prepare_args prepare;
	struct abi_word_args word;
	struct abi_fwd_args fwd;
	struct abi_combine_args combine;
	struct abi_appendkv_args appendkv;
	struct abi_bwd_args bwd;
};

#endif
