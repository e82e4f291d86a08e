/* SPDX-License-Identifier: MIT */
#include "oracle.h"

#include <math.h>

#include <kernels/reference.h>

static bool has(const struct oracle *o, enum fmha_tensor_role role)
{
	return fmha_tensor_present(&o->p->tensor[role]);
}

static const void *memory_of(const struct oracle *o, enum fmha_tensor_role role)
{
	if (role == FMHA_T_K && o->k)
		return o->k;
	if (role == FMHA_T_V && o->v)
		return o->v;
	return o->f->bindings[role].host;
}

static int64_t index_of(const struct oracle *o, enum fmha_tensor_role role, const int64_t i[5])
{
	int64_t index = 0;

	for (int d = 0; d < 5; d++)
		index += i[d] * o->p->tensor[role].stride[d];
	return index;
}

double oracle_load(const struct oracle *o, enum fmha_tensor_role role, const int64_t i[5])
{
	return reference_load(memory_of(o, role), o->p->tensor[role].dtype, index_of(o, role, i));
}

void oracle_store(const struct oracle *o, enum fmha_tensor_role role, const int64_t i[5],
		  double value)
{
	reference_store((void *)memory_of(o, role), o->p->tensor[role].dtype, index_of(o, role, i),
			value);
}

static int load_int(const struct oracle *o, enum fmha_tensor_role role, int64_t i, int64_t j)
{
	const int32_t *data = o->f->bindings[role].host;

	return data[index_of(o, role, AT(i, j))];
}

struct oracle_sequence oracle_sequence(const struct oracle *o, int64_t b)
{
	const struct fmha_problem *p = o->p;
	struct oracle_sequence s = {.b = b, .rows = p->seqlen_q};
	int total = p->seqlen_k;

	if (p->mode == FMHA_GROUP) {
		s.q_start = load_int(o, FMHA_T_SEQSTART_Q, b, 0);
		s.rows = (int)(load_int(o, FMHA_T_SEQSTART_Q, b + 1, 0) - s.q_start);
	}
	if (has(o, FMHA_T_SEQLEN_Q))
		s.rows = load_int(o, FMHA_T_SEQLEN_Q, b, 0);
	if (has(o, FMHA_T_SEQSTART_K)) {
		s.k_start = load_int(o, FMHA_T_SEQSTART_K, b, 0);
		total = (int)(load_int(o, FMHA_T_SEQSTART_K, b + 1, 0) - s.k_start);
	}
	if (has(o, FMHA_T_KV_INDPTR)) {
		int pages = load_int(o, FMHA_T_KV_INDPTR, b + 1, 0) -
			    load_int(o, FMHA_T_KV_INDPTR, b, 0);

		total = pages == 0 ? 0
				   : (pages - 1) * p->page_size +
					     load_int(o, FMHA_T_KV_LAST_PAGE_LEN, b, 0);
	}
	if (has(o, FMHA_T_SEQLEN_K))
		total = load_int(o, FMHA_T_SEQLEN_K, b, 0) + p->seqlen_new;
	s.before = total - p->seqlen_new;
	s.pad = has(o, FMHA_T_LEFTPAD_K) ? load_int(o, FMHA_T_LEFTPAD_K, b, 0) : 0;
	s.keys = total - s.pad;
	return s;
}

static int64_t page_of(const struct oracle *o, const struct oracle_sequence *s, int64_t position)
{
	int64_t n = position / o->p->page_size;

	if (has(o, FMHA_T_BLOCK_TABLE))
		return load_int(o, FMHA_T_BLOCK_TABLE, s->b, n);
	return load_int(o, FMHA_T_KV_PAGE_INDICES, load_int(o, FMHA_T_KV_INDPTR, s->b, 0) + n, 0);
}

int64_t oracle_cache_index(const struct oracle *o, bool is_v, const struct oracle_sequence *s,
			   int64_t position, int h, int d)
{
	enum fmha_tensor_role role = is_v ? FMHA_T_V : FMHA_T_K;
	const struct fmha_problem *p = o->p;
	int64_t row = s->b, page, slot, x = 16 / fmha_dtype_bytes(p->k.dtype);

	if (p->page_size == 0) {
		if (has(o, FMHA_T_SEQSTART_K))
			return index_of(o, role, AT(0, s->k_start + position, h, d));
		if (has(o, FMHA_T_CACHE_BATCH_IDX))
			row = load_int(o, FMHA_T_CACHE_BATCH_IDX, s->b, 0);
		return index_of(o, role, AT(row, position, h, d));
	}
	page = page_of(o, s, position);
	slot = position % p->page_size;
	if (p->kv_layout == FMHA_KV_LINEAR)
		return index_of(o, role, AT(page, slot, h, d));
	if (is_v) /* [n_pages, nhead_k, page_size / x, hdim_v, x] */
		return ((page * p->nhead_k + h) * (p->page_size / x) + slot / x) * p->hdim_v * x +
		       d * x + slot % x;
	/* [n_pages, nhead_k, hdim_q / x, page_size, x] */
	return ((page * p->nhead_k + h) * (p->hdim_q / x) + d / x) * p->page_size * x + slot * x +
	       d % x;
}

static double descale(const struct oracle *o, enum fmha_tensor_role role,
		      const struct oracle_sequence *s, int64_t position, int h)
{
	int block = role == FMHA_T_Q_DESCALE ? o->p->descale_block_q : o->p->descale_block_k;

	if (!has(o, role))
		return 1;
	if (role != FMHA_T_Q_DESCALE && o->p->descale_per_page)
		return oracle_load(o, role,
				   AT(page_of(o, s, position), h,
				      block ? position % o->p->page_size / block : 0));
	return oracle_load(o, role, AT(s->b, h, block ? position / block : 0));
}

/* The pair partner and the table column of rotated dimension @d. */
static double rotated(const struct oracle *o, int position, int d, double self, double partner)
{
	int half = o->p->rotary_dim / 2;
	bool interleaved = o->p->rope == FMHA_ROPE_INTERLEAVED;
	int i = interleaved ? d / 2 : d % half;
	bool first = interleaved ? d % 2 == 0 : d < half;
	double c = oracle_load(o, FMHA_T_ROTARY_COS, AT(position, i));
	double s = oracle_load(o, FMHA_T_ROTARY_SIN, AT(position, i));

	return first ? self * c - partner * s : self * c + partner * s;
}

static int partner_of(const struct oracle *o, int d)
{
	int half = o->p->rotary_dim / 2;

	if (o->p->rope == FMHA_ROPE_INTERLEAVED)
		return d ^ 1;
	return d < half ? d + half : d - half;
}

static double q_plain(const struct oracle *o, const struct oracle_sequence *s, int i, int h, int d)
{
	if (o->p->mode == FMHA_GROUP)
		return oracle_load(o, FMHA_T_Q, AT(0, s->q_start + i, h, d));
	return oracle_load(o, FMHA_T_Q, AT(s->b, i, h, d));
}

double oracle_q(const struct oracle *o, const struct oracle_sequence *s, int i, int h, int d)
{
	double q = q_plain(o, s, i, h, d);
	int position = s->before + (o->p->mask == FMHA_MASK_NONE ? 0 : i);

	if (o->p->rope == FMHA_ROPE_NONE || d >= o->p->rotary_dim)
		return q;
	return rotated(o, position, d, q, q_plain(o, s, i, h, partner_of(o, d)));
}

void oracle_append(const struct oracle *o)
{
	const struct fmha_problem *p = o->p;

	for (int64_t b = 0; b < p->batch; b++) {
		struct oracle_sequence s = oracle_sequence(o, b);

		for (int i = 0; i < p->seqlen_new; i++)
			for (int h = 0; h < p->nhead_k; h++) {
				int position = s.before + i;

				for (int d = 0; d < p->hdim_q; d++) {
					double x = oracle_load(o, FMHA_T_K_NEW, AT(b, i, h, d));

					if (p->rope != FMHA_ROPE_NONE && d < p->rotary_dim)
						x = rotated(
							o, position, d, x,
							oracle_load(o, FMHA_T_K_NEW,
								    AT(b, i, h, partner_of(o, d))));
					reference_store(
						o->k, p->k.dtype,
						oracle_cache_index(o, false, &s, position, h, d),
						x);
				}
				for (int d = 0; d < p->hdim_v; d++)
					reference_store(
						o->v, p->v.dtype,
						oracle_cache_index(o, true, &s, position, h, d),
						oracle_load(o, FMHA_T_V_NEW, AT(b, i, h, d)));
			}
	}
}

/* By a mask that is data, from the definition: is @j in one of the intervals, is its bit set? */
static bool in_mask(const struct oracle *o, const struct oracle_sequence *s, int h, int i, int j)
{
	const struct fmha_problem *p = o->p;
	int64_t b = p->mode == FMHA_GROUP ? 0 : s->b, row = s->q_start + i;
	bool seen = false;

	if (has(o, FMHA_T_MASK_BITS))
		return (int)oracle_load(o, FMHA_T_MASK_BITS, AT(b, h, row, j / 8)) >> (j % 8) & 1;
	if (!has(o, FMHA_T_MASK_INTERVALS))
		return true;
	for (int e = 0; e < p->mask_endpoints; e += 2) {
		double begin = e ? oracle_load(o, FMHA_T_MASK_INTERVALS, AT(b, h, e - 1, row)) : 0;

		seen |= begin <= j && j < oracle_load(o, FMHA_T_MASK_INTERVALS, AT(b, h, e, row));
	}
	return seen;
}

static bool visible(const struct oracle *o, const struct oracle_sequence *s, int h, int i, int j)
{
	const struct fmha_problem *p = o->p;
	int at = p->mask == FMHA_MASK_BOTTOM_RIGHT ? s->keys - s->rows + i : i;

	if (!in_mask(o, s, h, i, j))
		return false;
	if (p->mask == FMHA_MASK_NONE)
		return true;
	if (p->window_right >= 0 && j > at + p->window_right)
		return false;
	return p->window_left < 0 || j >= at - p->window_left || j < p->sink_tokens;
}

static double score(const struct oracle *o, const struct oracle_sequence *s, int h, int i, int j,
		    double *ret_cap_slope)
{
	const struct fmha_problem *p = o->p;
	int hk = h / (p->nhead_q / p->nhead_k);
	int position = s->pad + j;
	double x = 0;

	for (int d = 0; d < p->hdim_q; d++)
		x += oracle_q(o, s, i, h, d) *
		     reference_load(memory_of(o, FMHA_T_K), p->k.dtype,
				    oracle_cache_index(o, false, s, position, hk, d));
	x *= p->scale * descale(o, FMHA_T_Q_DESCALE, s, i, h) *
	     descale(o, FMHA_T_K_DESCALE, s, position, hk);
	*ret_cap_slope = 1;
	if (p->logits_soft_cap > 0) {
		double t = tanh(x / p->logits_soft_cap);

		x = p->logits_soft_cap * t;
		*ret_cap_slope = 1 - t * t;
	}
	if (has(o, FMHA_T_BIAS))
		x += p->mode == FMHA_GROUP
			     ? oracle_load(o, FMHA_T_BIAS, AT(0, h, s->q_start + i, j))
			     : oracle_load(o, FMHA_T_BIAS, AT(s->b, h, i, j));
	if (has(o, FMHA_T_ALIBI_SLOPES))
		x -= oracle_load(o, FMHA_T_ALIBI_SLOPES, AT(s->b, h)) *
		     fabs((double)i + s->keys - s->rows - j);
	return x;
}

double oracle_row(const struct oracle *o, const struct oracle_sequence *s, int h, int i,
		  double *row_o, double *p_out, double *keep_out, double *cap_slope)
{
	const struct fmha_problem *p = o->p;
	int hk = h / (p->nhead_q / p->nhead_k);
	double *x = calloc((size_t)s->keys + 1, sizeof(*x)), max = -INFINITY, sum = 0, lse;
	double sink = has(o, FMHA_T_SINK) ? oracle_load(o, FMHA_T_SINK, AT(h)) : -INFINITY;

	for (int j = 0; j < s->keys; j++) {
		double slope;

		x[j] = visible(o, s, h, i, j) ? score(o, s, h, i, j, &slope) : -INFINITY;
		if (cap_slope)
			cap_slope[j] = x[j] == -INFINITY ? 0 : slope;
		max = fmax(max, x[j]);
	}
	max = fmax(max, sink);
	if (max == -INFINITY)
		max = 0;
	for (int j = 0; j < s->keys; j++)
		sum += exp(x[j] - max);
	sum += exp(sink - max);
	lse = sum > 0 ? max + log(sum) : -INFINITY;
	for (int d = 0; d < p->hdim_v; d++)
		row_o[d] = 0;
	for (int j = 0; j < s->keys; j++) {
		double weight = sum > 0 ? exp(x[j] - lse) : 0, keep = 1;

		if (p->dropout_p > 0) {
			float kept = 1.0F - p->dropout_p;

			keep = reference_dropout_byte(
				       p->dropout_seed, p->dropout_offset, (uint32_t)s->b,
				       (uint32_t)h, (uint32_t)p->nhead_q,
				       (uint32_t)(i + p->dropout_row),
				       (uint32_t)(j + p->dropout_column)) <= floor(255.0 * kept)
				       ? 1.0 / kept
				       : 0;
		}
		if (p_out)
			p_out[j] = weight;
		if (keep_out)
			keep_out[j] = keep;
		if (weight == 0)
			continue;
		for (int d = 0; d < p->hdim_v; d++)
			row_o[d] += weight * keep *
				    descale(o, FMHA_T_V_DESCALE, s, s->pad + j, hk) *
				    reference_load(
					    memory_of(o, FMHA_T_V), p->v.dtype,
					    oracle_cache_index(o, true, s, s->pad + j, hk, d));
	}
	free(x);
	return lse;
}
