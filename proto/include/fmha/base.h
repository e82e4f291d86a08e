/* SPDX-License-Identifier: MIT */
/*
 * The words that every layer shares: errors, data types, and the attention problem.
 *
 * This header is installed beside fmha.h, which includes it; programs include only <fmha/fmha.h>.
 * A problem is plain data: sizes, options, and one tensor view per role. The same struct is what a
 * program fills in, what the client library puts on the wire, and what the daemon validates, so
 * that a field has one name from the caller to the error message.
 */
#ifndef FMHA_BASE_H
#define FMHA_BASE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* libfmha_client exports these; everything else in it is hidden. */
#define FMHA_API __attribute__((visibility("default")))

/*
 * X(name, value, sentence). Values are stable: they travel on the wire and into other languages.
 * Zero is success; a negative value is returned by a function that failed.
 */
#define FMHA_ERRORS(X)                                                                             \
	X(EINVAL, -1, "the request breaks a documented rule")                                      \
	X(ENOMEM, -2, "host or device memory is exhausted")                                        \
	X(EPROTO, -3, "the peer broke the wire protocol; the connection is closed")                \
	X(ENOTSUP, -4, "a sound request that this build or device does not support")               \
	X(ENOKERNEL, -5, "no kernel of this device fits the problem")                              \
	X(EDEVICE, -6, "the device's worker failed while the request was in flight")               \
	X(ETIMEDOUT, -7, "no answer before the deadline")                                          \
	X(EQUOTA, -8, "a per-user or per-connection limit is reached")                             \
	X(EPERM, -9, "the caller may not do this")                                                 \
	X(ENOENT, -10, "no such object, or it belongs to somebody else")                           \
	X(ECONN, -11, "the daemon cannot be reached or hung up")                                   \
	X(EVERSION, -12, "client and daemon share no protocol version")                            \
	X(ECANCELED, -13, "the request was cancelled before it ran")                               \
	X(EBUSY, -14, "try again: the daemon is draining or restarting a worker")                  \
	X(EIO, -15, "a file or system call failed")                                                \
	X(EINTERNAL, -16, "a bug in fmhad: please report it")

enum fmha_error_code {
	FMHA_OK = 0,
#define FMHA_ERROR_ENUM(name, value, sentence) FMHA_##name = (value),
	FMHA_ERRORS(FMHA_ERROR_ENUM)
#undef FMHA_ERROR_ENUM
};

/*
 * What went wrong, for programs (code, field) and for people (msg). The text is inside the struct
 * so that reporting out-of-memory cannot itself fail. A function that takes one fills it on
 * failure only; it may be NULL.
 */
struct fmha_error {
	int code;       /* FMHA_OK or one of FMHA_E* */
	char field[48]; /* the offending field, such as "tensor.k.stride", or empty */
	char msg[256];  /* one sentence, no newline, cut off when longer */
};

/* X(NAME, name, bytes). Values count from 0 and are stable. */
#define FMHA_DTYPES(X)                                                                             \
	X(F32, f32, 4)                                                                             \
	X(F16, f16, 2)   /* IEEE binary16 */                                                       \
	X(BF16, bf16, 2) /* bfloat16 */                                                            \
	X(E4M3, e4m3, 1) /* OCP fp8 e4m3fn: max 448, no infinity, NaN is 0x7f and 0xff */          \
	X(E5M2, e5m2, 1) /* OCP fp8 e5m2: max 57344 */                                             \
	X(I32, i32, 4)   /* lengths, prefix sums, page numbers */                                  \
	X(U8, u8, 1)     /* stored dropout bytes; raw workspace */                                 \
	X(I64, i64, 8)   /* slots and positions of an append */                                    \
	X(I8, i8, 1)     /* keys and values under a q of 16 bits */

enum fmha_dtype {
#define FMHA_DTYPE_ENUM(NAME, name, bytes) FMHA_##NAME,
	FMHA_DTYPES(FMHA_DTYPE_ENUM)
#undef FMHA_DTYPE_ENUM
};
#define FMHA_N_DTYPES 9

enum fmha_op {
	FMHA_FORWARD = 0,      /* O = softmax(...) V; with k_new: append to the cache first */
	FMHA_BACKWARD = 1,     /* dQ, dK, dV (dBias, dSink) from dO, O and LSE */
	FMHA_APPEND_KV = 2,    /* write k_new, v_new into the cache, with rotary embedding */
	FMHA_MERGE_STATES = 3, /* combine partial (O, LSE) pairs of disjoint key ranges */
};

enum fmha_mode {
	FMHA_BATCH = 0, /* equal physical lengths: a batch dimension */
	FMHA_GROUP = 1, /* varlen: sequences packed on one axis, see seqstart_q and seqstart_k */
};

/*
 * The mask is a band: row i (of seqlen_q) sees column j (of seqlen_k) when
 *   anchor + i - window_left <= j <= anchor + i + window_right,
 * with anchor 0 (top-left) or seqlen_k - seqlen_q (bottom-right), per sequence, and -1 unlimited.
 * Causal is window_left -1, window_right 0. Columns below sink_tokens stay visible under a window
 * as long as they do not lie right of the band.
 */
enum fmha_mask {
	FMHA_MASK_NONE = 0,
	FMHA_MASK_TOP_LEFT = 1,
	FMHA_MASK_BOTTOM_RIGHT = 2,
};

enum fmha_rope {
	FMHA_ROPE_NONE = 0,
	FMHA_ROPE_INTERLEAVED = 1,  /* pairs (2i, 2i + 1): GPT-J */
	FMHA_ROPE_HALF_ROTATED = 2, /* pairs (i, i + rotary_dim / 2): GPT-NeoX, Llama */
};

/* How a paged cache stores one page; x = 16 bytes / element size. */
enum fmha_kv_layout {
	FMHA_KV_LINEAR = 0,     /* K, V [n_pages, page_size, nhead_k, hdim], strides free */
	FMHA_KV_VECTORIZED = 1, /* K [n_pages, nhead_k, hdim_q / x, page_size, x],
				 * V [n_pages, nhead_k, page_size / x, hdim_v, x], packed */
	FMHA_KV_LATENT_FP8 =
		2, /* latents: K [n_pages, page_size, 1, 656] of e4m3, paged or not, see
				 * v_in_k */
};

/* FMHA_KV_LATENT_FP8: 512 elements of e4m3; four f32, by which 128 of them each are multiplied; 64 bf16. */
#define FMHA_LATENT_BYTES 656

/*
 * One tensor view: element (i0, i1, ...) lies at offset + size(dtype) * sum(i_n * stride[n]) bytes
 * from the start of the buffer. A view is absent when buffer is 0 and data is NULL.
 *
 * The extents that a view must have follow from the problem's sizes and the tensor's role. Who knows
 * those that a tensor really has says them, and then they are compared: n_dims, extent and stride are
 * literal, leading axes that are missing count as 1 (trailing ones of descales), and an axis of extent
 * 1 broadcasts where the role lets it (FMHA_TENSORS). Of a view with n_dims 0 nothing is known but
 * where it begins: all strides 0 mean packed, and a stride of 0 on one axis broadcasts it (inputs
 * only).
 */
struct fmha_tensor {
	uint64_t buffer; /* id of a registered buffer, 0: none */
	uint64_t offset; /* bytes */
	void *data;      /* ordinary memory, staged by the client library; only when buffer is 0 */
	uint32_t dtype;  /* enum fmha_dtype */
	uint32_t n_dims; /* of stride and extent; 0: the extents are not said */
	int64_t stride[5]; /* elements, in the order of the role's dimensions */
	int64_t extent[5]; /* elements, likewise */
};

/*
 * X(NAME, name, n_dims, dims, direction): the roles a tensor can have. `dims` is documentation; the
 * extents are computed by problem_extents() in proto/problem.c. direction: in, out or inout.
 * In group mode batch is 1 and seqlen_q, seqlen_k are total_q, total_k, except where the row says
 * "max": then the axis keeps the longest sequence's length.
 */
#define FMHA_TENSORS(X)                                                                            \
	X(Q, q, 4, "batch, seqlen_q, nhead_q, hdim_q", IN)                                         \
	X(K, k, 4, "batch, seqlen_k, nhead_k, hdim_q; paged: see fmha_kv_layout", IN)              \
	X(V, v, 4, "batch, seqlen_k, nhead_k, hdim_v; paged: see fmha_kv_layout", IN)              \
	X(O, o, 4, "batch, seqlen_q, nhead_q, hdim_v; an input of backward", OUT)                  \
	X(LSE, lse, 3, "batch, nhead_q, seqlen_q; f32, natural log; an input of backward", OUT)    \
	X(BIAS, bias, 4, "batch, nhead_q, seqlen_q, max seqlen_k; each may be 1", IN)              \
	X(ALIBI_SLOPES, alibi_slopes, 2, "batch, nhead_q; f32; batch may be 1", IN)                \
	X(SINK, sink, 1, "nhead_q; f32 logit added to the softmax denominator", IN)                \
	X(RANDVAL, randval, 4, "batch, nhead_q, seqlen_q, max seqlen_k; u8 dropout bytes", OUT)    \
	X(SEQSTART_Q, seqstart_q, 1, "batch + 1; i32 prefix sums of physical lengths", IN)         \
	X(SEQSTART_K, seqstart_k, 1, "batch + 1; i32 prefix sums of physical lengths", IN)         \
	X(SEQLEN_Q, seqlen_q_per_batch, 1, "batch; i32 lengths without padding", IN)               \
	X(SEQLEN_K, seqlen_k_per_batch, 1, "batch; i32 lengths without padding", IN)               \
	X(BLOCK_TABLE, block_table, 2, "batch, max_blocks; i32 page numbers (vLLM)", IN)           \
	X(KV_INDPTR, kv_indptr, 1, "batch + 1; i32 into kv_page_indices (SGLang)", IN)             \
	X(KV_PAGE_INDICES, kv_page_indices, 1, "n_page_indices; i32 page numbers (SGLang)", IN)    \
	X(KV_LAST_PAGE_LEN, kv_last_page_len, 1, "batch; i32, 1..page_size (SGLang)", IN)          \
	X(CACHE_BATCH_IDX, cache_batch_idx, 1, "batch; i32 row of a contiguous cache", IN)         \
	X(LEFTPAD_K, leftpad_k, 1, "batch; i32 keys to skip at the left", IN)                      \
	X(Q_DESCALE, q_descale, 3, "batch, nhead_q, ceil(seqlen_q / descale_block_q); f32", IN)    \
	X(K_DESCALE, k_descale, 3, "batch, nhead_k, ceil(seqlen_k / descale_block_k); f32", IN)    \
	X(V_DESCALE, v_descale, 3, "batch, nhead_k, ceil(seqlen_k / descale_block_k); f32", IN)    \
	X(K_NEW, k_new, 4, "batch, seqlen_new, nhead_k, hdim_q", IN)                               \
	X(V_NEW, v_new, 4, "batch, seqlen_new, nhead_k, hdim_v", IN)                               \
	X(ROTARY_COS, rotary_cos, 2, "rotary_max_pos, rotary_dim / 2; f32 or the type of k", IN)   \
	X(ROTARY_SIN, rotary_sin, 2, "rotary_max_pos, rotary_dim / 2; f32 or the type of k", IN)   \
	X(Q_ROTATED, q_rotated, 4, "batch, seqlen_q, nhead_q, hdim_q; append_kv only", OUT)        \
	X(DO, d_o, 4, "batch, seqlen_q, nhead_q, hdim_v", IN)                                      \
	X(DQ, dq, 4, "batch, seqlen_q, nhead_q, hdim_q", OUT)                                      \
	X(DK, dk, 4, "batch, seqlen_k, nhead_k, hdim_q", OUT)                                      \
	X(DV, dv, 4, "batch, seqlen_k, nhead_k, hdim_v", OUT)                                      \
	X(DBIAS, dbias, 4, "as bias; summed over the axes where that has 1", OUT)                  \
	X(DSINK, dsink, 1, "nhead_q; f32", OUT)                                                    \
	X(DLSE, dlse, 3, "as lse; f32, the gradient that reaches LSE itself, if any", IN)          \
	X(O_PARTS, o_parts, 5, "n_parts, batch, seqlen_q, nhead_q, hdim_v", IN)                    \
	X(LSE_PARTS, lse_parts, 4, "n_parts, batch, nhead_q, seqlen_q; f32", IN)                   \
	X(WORKSPACE, workspace, 1, "u8; checked, not used: only fmhad's own is safe from writers", \
	  INOUT)                                                                                   \
	X(MASK_INTERVALS, mask_intervals, 4,                                                       \
	  "batch, nhead_q, mask_endpoints, seqlen_q; i32; the first two may be 1", IN)             \
	X(MASK_BITS, mask_bits, 4,                                                                 \
	  "batch, nhead_q, seqlen_q, ceil(max seqlen_k / 8); u8; the first three may be 1", IN)    \
	X(SLOT_MAPPING, slot_mapping, 2, "batch, seqlen_new; i64 page * page_size + slot", IN)     \
	X(POSITIONS, positions, 2, "batch, seqlen_new; i64, of rows that rope turns by slots", IN) \
	X(INDICES, indices, 3, "batch, seqlen_q, topk; i32, of keys that a row sees", IN)

enum fmha_tensor_role {
#define FMHA_ROLE_ENUM(NAME, name, n_dims, dims, direction) FMHA_T_##NAME,
	FMHA_TENSORS(FMHA_ROLE_ENUM)
#undef FMHA_ROLE_ENUM
		FMHA_N_TENSORS
};

/*
 * X(type, name, neutral, least, most, ops, word, option, meaning): what a problem says beside its tensors,
 * in the order of struct fmha_problem. Struct, wire, checks, shape words, fmhactl's options and the tables
 * of PROTOCOL.md come from here.
 *   type     CHOICE: an enum; FLAG: 0 or 1; SIZE, NUMBER: int32_t; COUNTER: uint64_t; REAL, ABSENT_REAL:
 *            float, the latter NaN when it is not said
 *   neutral  what fmha_problem_init() writes
 *   ops      that take it: a SIZE means nothing to the others, anything else has to be neutral there
 *   word     its key in the words under which measured times are kept; PLACED: it has a place of its own
 *            there, or none because no time depends on it
 *   option   fmhactl's: ONE(name, argument, help), TWO(..., second name, its help); NONE, or one that
 *            is more than this field
 */
#define FMHA_PROBLEM_FIELDS(X)                                                                     \
	X(CHOICE, op, FMHA_FORWARD, 0, FMHA_MERGE_STATES, OPS_ALL, PLACED, NONE,                   \
	  "what to compute")                                                                       \
	X(CHOICE, mode, FMHA_BATCH, 0, FMHA_GROUP, OPS_ALL, PLACED, NONE,                          \
	  "batch: equal lengths; group: sequences packed on one axis")                             \
	X(SIZE, batch, 0, 0, 1 << 20, OPS_ALL, PLACED, NONE, "sequences")                          \
	X(SIZE, nhead_q, 0, 1, 1 << 16, OPS_ATTENTION | OP_MERGE, PLACED, NONE,                    \
	  "a multiple of nhead_k")                                                                 \
	X(SIZE, nhead_k, 0, 1, 1 << 16, OPS_ATTENTION | OP_APPEND, PLACED, NONE,                   \
	  "heads of k and v")                                                                      \
	X(SIZE, seqlen_q, 0, 0, INT32_MAX, OPS_ALL, PLACED, NONE,                                  \
	  "rows; group mode: of the longest sequence")                                             \
	X(SIZE, seqlen_k, 0, 0, INT32_MAX, OPS_ATTENTION | OP_APPEND, PLACED, NONE,                \
	  "keys; group mode and pages: of the longest sequence; else the capacity of k and v")     \
	X(SIZE, hdim_q, 0, 1, 576, OPS_ATTENTION | OP_APPEND, PLACED, NONE,                        \
	  "of q and k: 1 to 576")                                                                  \
	X(SIZE, hdim_v, 0, 1, 512, OPS_ALL, PLACED, NONE, "of v and o: 1 to 512")                  \
	X(NUMBER, total_q, 0, 0, INT32_MAX, OPS_ALL, PLACED, NONE,                                 \
	  "group mode: length of the packed q axis")                                               \
	X(NUMBER, total_k, 0, 0, INT32_MAX, OPS_ALL, PLACED, NONE,                                 \
	  "group mode: length of the packed k axis")                                               \
	X(CHOICE, mask, FMHA_MASK_NONE, 0, FMHA_MASK_BOTTOM_RIGHT, OPS_ATTENTION | OP_APPEND,      \
	  PLACED, NONE, "the corner that the band is anchored at")                                 \
	X(NUMBER, window_left, -1, -1, INT32_MAX, OPS_ALL, PLACED, NONE,                           \
	  "columns left of the diagonal that stay visible; -1: unlimited")                         \
	X(NUMBER, window_right, -1, -1, INT32_MAX, OPS_ALL, PLACED, NONE,                          \
	  "likewise to the right; 0: causal")                                                      \
	X(NUMBER, sink_tokens, 0, 0, INT32_MAX, OPS_ATTENTION, PLACED,                             \
	  ONE("sink-tokens", "N", "leading keys visible left of any window"),                      \
	  "leading keys visible under any window")                                                 \
	X(NUMBER, min_seqlen_q, 0, 0, INT32_MAX, OP_FORWARD | OP_MERGE, "min", NONE,               \
	  "group mode: shorter sequences are skipped")                                             \
	X(ABSENT_REAL, scale, NAN, 0, 0, OPS_ALL, PLACED,                                          \
	  TWO("scale", "S", "factor on Q K^T (default 1/sqrt(hdim_q))", "scale_s",                 \
	      "the same, 0 being the default"),                                                    \
	  "absent: 1 / sqrt(hdim_q)")                                                              \
	X(REAL, logits_soft_cap, 0, 0, 0, OPS_ATTENTION, "cap",                                    \
	  TWO("softcap", "C", "C * tanh(S / C)", "logits_soft_cap", "the same"), "0: none")        \
	X(REAL, dropout_p, 0, 0, 0, OPS_ATTENTION, "drop",                                         \
	  TWO("dropout", "P", "probability of dropping", "p_drop", "the same"),                    \
	  "probability of dropping, [0, 1)")                                                       \
	X(COUNTER, dropout_seed, 0, 0, 0, OPS_ALL, PLACED,                                         \
	  TWO("seed", "N", "of the dropout", "drop_seed", "the same"), "")                         \
	X(COUNTER, dropout_offset, 0, 0, 0, OPS_ALL, PLACED,                                       \
	  TWO("offset", "N", "of the dropout: where its random numbers begin", "drop_offset",      \
	      "the same"),                                                                         \
	  "")                                                                                      \
	X(FLAG, deterministic, 0, 0, 1, OPS_ALL, "det",                                            \
	  ONE("deterministic", NULL, "backward: the same bits on every run"),                      \
	  "backward: same bits on every run")                                                      \
	X(NUMBER, n_splits, 0, 0, 1024, OP_FORWARD | OP_BACKWARD, "n",                             \
	  TWO("splits", "N", "keys in N parts, backward those of dQ's sum (1: never)",             \
	      "num_splits", "the same"),                                                           \
	  "0: the planner chooses, 1: never split")                                                \
	X(NUMBER, split_size, 0, 0, INT32_MAX, OP_FORWARD, "z",                                    \
	  ONE("split-size", "KEYS", "split-KV into parts of so many keys"),                        \
	  "keys a split, whatever the lengths; 0: not fixed")                                      \
	X(NUMBER, page_size, 0, 0, 1024, OP_FORWARD | OP_APPEND, "p",                              \
	  TWO("page-size", "N", "the cache is paged", "page_block_size", "the same"),              \
	  "keys a page, at most 1024; 0: contiguous")                                              \
	X(NUMBER, n_pages, 0, 0, INT32_MAX, OPS_ALL, PLACED, NONE, "pages in k and v")             \
	X(NUMBER, max_blocks, 0, 0, INT32_MAX, OPS_ALL, PLACED, NONE, "columns of block_table")    \
	X(NUMBER, n_page_indices, 0, 0, INT32_MAX, OPS_ALL, PLACED, NONE,                          \
	  "length of kv_page_indices")                                                             \
	X(CHOICE, kv_layout, FMHA_KV_LINEAR, 0, FMHA_KV_LATENT_FP8, OPS_ALL, "vec",                \
	  ONE("kv-layout", "linear|vectorized|latent_fp8", "of a page (default: linear)"),         \
	  "of a page, or of latents")                                                              \
	X(NUMBER, cache_batch, 0, 0, INT32_MAX, OP_FORWARD | OP_APPEND, PLACED, NONE,              \
	  "rows of k and v under cache_batch_idx; 0: batch")                                       \
	X(NUMBER, descale_block_q, 0, 0, INT32_MAX, OP_FORWARD, "kq", NONE,                        \
	  "rows that share a q_descale; 0: all")                                                   \
	X(NUMBER, descale_block_k, 0, 0, INT32_MAX, OP_FORWARD | OP_APPEND, "kk", NONE,            \
	  "keys that share a k_descale, v_descale; 0: all")                                        \
	X(FLAG, descale_per_page, 0, 0, 1, OP_FORWARD | OP_APPEND, "kp", NONE,                     \
	  "k_descale, v_descale: [n_pages, nhead_k, ceil(page_size / descale_block_k)]")           \
	X(CHOICE, rope, FMHA_ROPE_NONE, 0, FMHA_ROPE_HALF_ROTATED, OP_FORWARD | OP_APPEND, "r",    \
	  ONE("rope", "none|interleaved|half", "rotary embedding of what is appended"),            \
	  "how appended keys and q rotate")                                                        \
	X(NUMBER, rotary_dim, 0, 0, 512, OPS_ALL, PLACED, NONE,                                    \
	  "leading elements that rotate: a multiple of 16")                                        \
	X(NUMBER, rotary_max_pos, 0, 0, INT32_MAX, OPS_ALL, PLACED, NONE,                          \
	  "rows of the cos and sin tables")                                                        \
	X(NUMBER, seqlen_new, 0, 0, INT32_MAX, OP_FORWARD | OP_APPEND, "w", NONE,                  \
	  "rows of k_new and v_new")                                                               \
	X(NUMBER, n_parts, 0, 0, 1024, OP_MERGE, "m", NONE, "merge_states: partial results")       \
	X(NUMBER, dropout_row, 0, 0, INT32_MAX, OPS_ATTENTION, PLACED,                             \
	  ONE("dropout-row", "N", "of the dropout: which row the first one is, a multiple of 16"), \
	  "number of the first row for dropout: a multiple of 16")                                 \
	X(NUMBER, dropout_column, 0, 0, INT32_MAX, OPS_ATTENTION, PLACED,                          \
	  ONE("dropout-column", "N", "likewise of the first key, a multiple of 32"),               \
	  "number of the first key for dropout: a multiple of 32")                                 \
	X(NUMBER, mask_endpoints, 0, 0, 63, OPS_ATTENTION, "me",                                   \
	  ONE("mask-endpoints", "N", "a mask of intervals, N endpoints a row: odd"),               \
	  "endpoints a row has in mask_intervals: odd; 0: none")                                   \
	X(FLAG, descale_computed, 0, 0, 1, OP_APPEND, "kc", NONE,                                  \
	  "append: k_descale, v_descale, of single slots, are found and written")                  \
	X(FLAG, v_in_k, 0, 0, 1, OP_FORWARD | OP_APPEND, "vk",                                     \
	  ONE("v-in-k", NULL, "the values are the first elements of the keys: MLA"),               \
	  "there is no v: it is the first hdim_v elements of k")                                   \
	X(NUMBER, topk, 0, 0, INT32_MAX, OP_FORWARD, "tk",                                         \
	  ONE("topk", "N", "each row sees N keys, which indices names"),                           \
	  "keys that indices names for a row; 0: no indices")                                      \
	X(FLAG, softcap_approx, 0, 0, 1, OP_FORWARD, "ca",                                         \
	  ONE("softcap-approx", NULL, "the cap's tanh may be off by 2^-11 of itself"),             \
	  "logits_soft_cap's tanh may be off by 2^-11 of itself")

/*
 * An attention problem, with
 *   S = scale * Q K^T; soft cap: c * tanh(S / c); + bias or ALiBi; mask; P = softmax(S) in f32;
 *   dropout on P; O = P V.
 * Query head h reads key head h / (nhead_q / nhead_k). Set it up with fmha_problem_init(), which
 * gives every option its neutral value, then fill in what the problem needs. A scale of 0 is a real
 * one; NaN says 1 / sqrt(hdim_q). seqlen_k counts k_new. With split_size, results do not depend on the
 * batch. Rotary embedding is for f32, f16 and bf16.
 *
 * What several fields say together; rows i and columns j, of bias and randval too, count from a
 * sequence's own first row and first real key, lengths are its own, without padding:
 *
 * ALiBi adds -slope * |i + seqlen_k - seqlen_q - j|: the last row lies on the last column,
 * whichever corner the mask is tied to.
 *
 * A mask may also be data, under whatever band there is: a row sees what both let it see. The endpoints
 * F0, F1, ... of a row in mask_intervals say a union of intervals of columns,
 *   [0, F0) and [F1, F2) and [F3, F4) and so on,
 * which is what cuDNN's flex_attention takes as [heads, endpoints, rows of all sequences]
 * (docs.nvidia.com/cudnn/fe-oss-apis/attention/flex_attention_design, "Public Mask Representation"). Any int32
 * is an endpoint: those below 0 count as 0, those beyond the sequence's keys as its last one's end, and an
 * interval that ends where it begins, or before, is empty; intervals may overlap and come in any order.
 * In mask_bits, bit j % 8 of byte j / 8 of a row says whether it sees column j. Either is read while the
 * kernels run: who changes it meanwhile gets a result that is some mixture, and nobody else notices.
 * Backward takes its forward's mask.
 *
 * A sink is a logit of each head that enters the softmax's denominator and no output. LSE counts
 * it: log(exp(sink) + sum exp(S)); a row that sees no key has O = 0 and LSE = sink (-inf without
 * one). Backward takes that LSE; dsink is -sum over rows of exp(sink - LSE) * D.
 * merge_states counts its sink once: the parts come without it.
 *
 * Backward has dS = P * (dP - D), D = rowsum(dO * O) - dlse: dlse is what a loss that depends on
 * LSE adds; it is not read in rows that see no key.
 *
 * Dropout takes one byte of Philox an element, a function of (seed, offset, batch, head, row,
 * column) alone, FlashAttention-2's for the same seed and offset. It keeps an element whose byte
 * is at most floor(255 * (1 - dropout_p)), scaled by 1 / (1 - dropout_p), with 1 - dropout_p in
 * float and the product in double: the rate has 256 steps, and the share
 *   (floor(255 * (1 - dropout_p)) + 1) / 256
 * is kept, as 0.8984 at 0.1. A call uses the counters from dropout_offset on, 32 * batch * nhead_q
 * of them: advance the offset by that much from call to call, or elements of two calls share their
 * bytes. Backward takes its forward's seed and offset, or the bytes themselves as randval, which
 * forward writes at hidden columns too. A part of a longer sequence says with dropout_row and
 * dropout_column where its own rows and keys begin there, and drops what the whole would.
 *
 * Padding is not written: O, LSE, dQ and dBias keep what they held in rows at or above
 * seqlen_q_per_batch, dK and dV in keys at or above seqlen_k_per_batch, all of them in rows that no
 * sequence owns, as those behind the last sum of seqstart_q; a dBias that is summed over batches, in
 * rows that none of them has. Zero them first where somebody adds over them (new arrays of the Python
 * package hold 0 there, LSE -inf). What inputs hold there is not used. In rows that are computed dBias
 * is 0 at columns without a key.
 *
 * Finite values of bias beyond 1.7e38 may count as that: a row of nothing but the lowest number is the
 * average of what it sees (of several splits, the average of theirs), a row of -inf is masked. Backward has
 * its weights from LSE, which is float32: of a row whose scores are all beyond 1e6 they are 1 % off, and
 * beyond 1e9 wrong. Mask with -inf where such a row has a gradient.
 *
 * With leftpad_k, a sequence's keys begin leftpad_k positions into its storage; seqlen_k_per_batch
 * counts those as well. Blocks of k_descale and v_descale count positions, so padding too.
 *
 * With k_new, seqlen_k_per_batch holds the lengths before: row i of k_new is written to position
 * seqlen_k_per_batch[b] + i (without them: the sequence's length - seqlen_new + i). Attention in
 * the same call sees the new keys. RoPE rotates a row of k_new by the position that it is written
 * to; q by the position of the first new key, plus i when there is a mask (causal, window); v_new
 * and what the cache holds not at all. At position p the pair (x, y) number n of enum fmha_rope
 * becomes (x * c - y * s, x * s + y * c), c = rotary_cos[p][n] and s = rotary_sin[p][n], in double,
 * rounded once; a position past the tables takes their last row. Elements from rotary_dim on are
 * copied.
 *
 * With slot_mapping, append_kv writes row i of sequence b of k_new and v_new to slot slot_mapping[b][i] %
 * page_size of page slot_mapping[b][i] / page_size: no table, no lengths, seqlen_k 0. A row whose slot is
 * -1 is left out; of two rows with one slot either may stay, or a part of each. RoPE turns it and row i of
 * q, which has as many, by positions[b][i]. Slots and positions that the cache and the tables do not have
 * are refused on the CPU before anything is written; a GPU, which alone reads them, leaves such rows out
 * and takes the nearest row of the tables.
 *
 * Keys and values of fp8 take q (forward) of f16 or bf16, and so k_new and v_new: element x of those is
 * stored as x / k_descale (v_descale), the factor that it is read with, of its own sequence, head and
 * place, divided in float, rounded once, and at most the type's largest finite number. Those of i8 take
 * them likewise and no others: they are cut at 127 and -127, and a NaN, which i8 has not, is 0. With
 * descale_computed (append_kv by pages and slots: descale_per_page, descale_block_k 1) a row's factor is
 * the largest |x| of its head over the type's largest number, at least 2^-100, and 1 of a row of zeros or
 * one that is not finite. RoPE comes before it: turned in double, rounded to float, divided.
 *
 * Multi-head latent attention, absorbed, is a forward whose values are part of its keys: with v_in_k there
 * is no v (no v_new, no v_descale), its element (.., d) is k's, hdim_v is at most hdim_q, and k_descale is
 * both's. DeepSeek's has one key head, hdim_q 576 and hdim_v 512; the last 64 elements, which are no values,
 * are turned by whoever makes them: rope, which turns the first ones, is not taken.
 *
 * In kv_layout latent_fp8, FlashMLA's "FP8 with scale", such a key takes FMHA_LATENT_BYTES bytes: its
 * first 512 elements as e4m3, four f32 factors, one for each 128 of them, its last 64 elements as bf16.
 * k is of e4m3, its last extent 656; offset and strides are multiples of 16. Q and new rows are of f16 or
 * bf16; an append finds the factors as descale_computed does. f16 elements become bf16, rounded once.
 *
 * With topk, a row of q sees the keys that its indices say and no others: positions of its sequence, or,
 * in pages without block_table and kv_indptr (seqlen_k 0), slots: page * page_size + place in the page. An
 * index that the sequence, or the cache, does not have (-1) is left out; one that is there twice counts
 * twice. All heads of a row share them. They are read while the kernels run. No mask, bias, ALiBi,
 * dropout, leftpad_k or splits with it.
 */
struct fmha_problem {
	uint32_t struct_size; /* sizeof(struct fmha_problem), set by fmha_problem_init() */

#define FMHA_MEMBER_CHOICE                 uint32_t
#define FMHA_MEMBER_FLAG                   uint32_t
#define FMHA_MEMBER_SIZE                   int32_t
#define FMHA_MEMBER_NUMBER                 int32_t
#define FMHA_MEMBER_COUNTER                uint64_t
#define FMHA_MEMBER_REAL                   float
#define FMHA_MEMBER_ABSENT_REAL            float
#define FMHA_FIELD_MEMBER(type, name, ...) FMHA_MEMBER_##type name;
	FMHA_PROBLEM_FIELDS(FMHA_FIELD_MEMBER)
#undef FMHA_FIELD_MEMBER

	union {
		struct {
#define FMHA_ROLE_MEMBER(NAME, name, n_dims, dims, direction) struct fmha_tensor name;
			FMHA_TENSORS(FMHA_ROLE_MEMBER)
#undef FMHA_ROLE_MEMBER
		};
		struct fmha_tensor tensor[FMHA_N_TENSORS];
	};
};

/* "EINVAL", ...; "EUNKNOWN" for a code that is not in the list. Static strings. */
FMHA_API const char *fmha_error_name(int code);

/* The list's sentence for @code. A static string. */
FMHA_API const char *fmha_error_sentence(int code);

/* Bytes of an element, 0 for a value that is no enum fmha_dtype. */
FMHA_API uint32_t fmha_dtype_bytes(uint32_t dtype);

/* "f32", "f16", "bf16", "e4m3", "e5m2", "i32", "u8", "i64", "i8"; NULL when unknown. A static string. */
FMHA_API const char *fmha_dtype_name(uint32_t dtype);

/* The largest byte that dropout keeps at this rate, below 1: see struct fmha_problem. 255 at 0. */
FMHA_API uint32_t fmha_dropout_threshold(float dropout_p);

/* Neutral values everywhere: no mask (windows -1), scale NaN (default), all tensors absent. */
FMHA_API void fmha_problem_init(struct fmha_problem *problem);

#ifdef __cplusplus
}
#endif

#endif
