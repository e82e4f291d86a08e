/* SPDX-License-Identifier: MIT */
/*
 * warm_model.c: what serving a model asks for: prompts, packed or not, decoding from pages, new keys
 * with it. Heads, head dim, window, soft cap and type are the model's; lengths stand for the classes of
 * problems that get kernels of their own.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "ctl.h"
#include "warm.h"
#include "json.h"

struct model {
	int heads_q, heads_k, hdim;
	int window; /* 0: none */
	double softcap;
	const char *dtype; /* NULL: f16 and bf16 */
};

static int number(const cJSON *object, const char *key, int fallback)
{
	const cJSON *item = ctl_member(object, key);

	return cJSON_IsNumber(item) ? item->valueint : fallback;
}

static const char *type_of(const cJSON *object)
{
	static const char *const names[][2] = {
		{"float16", "f16"}, {"bfloat16", "bf16"}, {"float32", "f32"}};
	const cJSON *item = ctl_member(object, "torch_dtype");

	if (!cJSON_IsString(item))
		item = ctl_member(object, "dtype");
	for (size_t i = 0; cJSON_IsString(item) && i < sizeof(names) / sizeof(names[0]); i++)
		if (strcmp(item->valuestring, names[i][0]) == 0)
			return names[i][1];
	return NULL;
}

static int read_model(const cJSON *root, const char *path, struct model *ret_model)
{
	const cJSON *text = ctl_member(root, "text_config");
	const cJSON *config = cJSON_IsObject(text) ? text : root;
	const cJSON *cap = ctl_member(config, "attn_logit_softcapping");
	const cJSON *uses = ctl_member(config, "use_sliding_window");
	struct model m = {.heads_q = number(config, "num_attention_heads", 0),
			  .dtype = type_of(config)};

	if (!m.dtype)
		m.dtype = type_of(root);
	m.heads_k = number(config, "num_key_value_heads", m.heads_q);
	m.hdim = number(config, "head_dim",
			m.heads_q > 0 ? number(config, "hidden_size", 0) / m.heads_q : 0);
	if (!cJSON_IsFalse(uses))
		m.window = number(config, "sliding_window", 0);
	if (cJSON_IsNumber(cap))
		m.softcap = cap->valuedouble;
	if (m.heads_q <= 0 || m.heads_k <= 0 || m.hdim <= 0 || m.heads_q % m.heads_k) {
		(void)fprintf(
			stderr,
			"fmhactl: %s: no num_attention_heads, or no head_dim or hidden_size\n",
			path);
		return CTL_IO;
	}
	*ret_model = m;
	return 0;
}

/* @mask: options of a mask with the model's window, or without. */
static int add_problems(struct warm_list *list, const struct model *m, const char *dtype,
			const char *mask)
{
	static const int prompts[] = {128, 1024, 8192}, batches[] = {1, 16, 128};
	static const int contexts[] = {1024, 8192};
	char model[128], cap[32] = "";
	int r = 0;

	if (m->softcap > 0)
		(void)snprintf(cap, sizeof(cap), " --softcap %g", m->softcap);
	(void)snprintf(model, sizeof(model), "--dtype %s --heads-q %d --heads-k %d --hdim %d%s",
		       dtype, m->heads_q, m->heads_k, m->hdim, cap);
	for (int i = 0; i < 3 && r == 0; i++) {
		r = warm_add(list, "forward %s --seqlen %d %s --lse", model, prompts[i], mask);
		if (r == 0)
			r = warm_add(list, "forward %s --group --batch 4 --seqlen %d %s", model,
				     prompts[i], mask);
		if (r == 0)
			r = warm_add(list,
				     "forward %s --group --batch 4 --seqlen %d --page-size 16 %s",
				     model, prompts[i], mask);
	}
	for (int i = 0; i < 6 && r == 0; i++) {
		int batch = batches[i % 3], keys = contexts[i / 3];

		r = warm_add(list,
			     "forward %s --batch %d --seqlen-q 1 --seqlen-k %d --page-size 16 %s",
			     model, batch, keys, mask);
		if (r == 0)
			r = warm_add(list,
				     "forward %s --batch %d --seqlen-q 1 --seqlen-k %d --new 1 %s",
				     model, batch, keys, mask);
	}
	return r;
}

static int add_model(struct warm_list *list, const struct model *model)
{
	const char *dtypes[] = {model->dtype ? model->dtype : "bf16", model->dtype ? NULL : "f16"};
	char window[64];
	int r = 0;

	(void)snprintf(window, sizeof(window), "--mask bottom_right --window %d,0",
		       model->window - 1);
	for (int i = 0; i < 2 && dtypes[i] && r == 0; i++) {
		r = add_problems(list, model, dtypes[i], "--causal");
		/* Layers with the window stand between layers without, in most models that have it. */
		if (r == 0 && model->window > 0)
			r = add_problems(list, model, dtypes[i], window);
	}
	return r;
}

int warm_add_model(struct warm_list *list, const char *path)
{
	struct model model;
	char *text = NULL;
	size_t size = 0;
	cJSON *root;
	int r = ctl_read_file(path, &text, &size);

	if (r != 0)
		return r;
	root = cJSON_ParseWithLength(text, size);
	free(text);
	if (!root) {
		(void)fprintf(stderr, "fmhactl: %s: not JSON\n", path);
		return CTL_IO;
	}
	r = read_model(root, path, &model);
	cJSON_Delete(root);
	return r == 0 ? add_model(list, &model) : r;
}
