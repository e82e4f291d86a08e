/* SPDX-License-Identifier: MIT */
/*
 * recipe_fill.c: contents. A tensor's numbers follow from the recipe's seed and the role. Large
 * tensors repeat after RECIPE_FILL_BLOCK elements and a few, so that rows do not line up.
 */
#include <math.h>
#include <string.h>

#include <kernels/reference.h>
#include <proto/problem.h>

#include "random.h"
#include "recipe.h"

static double content(uint32_t contents, uint64_t *state, int64_t i)
{
	switch ((enum recipe_contents)contents) {
	case RECIPE_UNIFORM:
		return random_uniform(state);
	case RECIPE_INTEGERS:
		return (double)(int)(random_next(state) % 7) - 3;
	case RECIPE_WAVES:
		return sin((double)i * 0.017);
	case RECIPE_NORMAL:
		break;
	}
	return random_normal(state);
}

static double value_of(const struct recipe *recipe, uint32_t role, uint64_t *state, int64_t i)
{
	switch (role) {
	case FMHA_T_ALIBI_SLOPES:
		return random_uniform(state) * 0.3;
	case FMHA_T_SINK:
		return 2 * random_normal(state);
	case FMHA_T_LSE_PARTS:
		return 3 * random_normal(state);
	case FMHA_T_Q_DESCALE:
	case FMHA_T_K_DESCALE:
	case FMHA_T_V_DESCALE:
		return 0.25 + random_uniform(state);
	case FMHA_T_ROTARY_COS:
	case FMHA_T_ROTARY_SIN:
		return cos(6.3 * random_uniform(state));
	default:
		return content(recipe->contents, state, i);
	}
}

double recipe_spread(const struct fmha_problem *problem, uint32_t role)
{
	const double most = 40; /* of the usual number; three times as much is the type's */
	bool of_v = role == FMHA_T_V || role == FMHA_T_V_DESCALE;
	uint32_t factor = of_v && !problem->v_in_k ? FMHA_T_V_DESCALE : FMHA_T_K_DESCALE;

	if (problem->k.dtype != FMHA_I8 || !fmha_tensor_present(&problem->tensor[factor]))
		return 1;
	if (role == FMHA_T_K || role == FMHA_T_V)
		return most;
	return role == factor ? 1 / most : 1;
}

bool recipe_is_result(const struct fmha_problem *problem, uint32_t role)
{
	bool of_forward = role == FMHA_T_O || role == FMHA_T_LSE || role == FMHA_T_RANDVAL;

	/* Backward's own inputs of that kind come from the forward run before it. */
	return proto_roles[role].output || (of_forward && problem->op == FMHA_BACKWARD);
}

static void fill_role(const struct recipe *recipe, uint32_t role, uint8_t *data)
{
	const struct fmha_problem *p = &recipe->problem;
	uint32_t dtype = p->tensor[role].dtype;
	uint64_t state = recipe->seed * UINT64_C(0xd1342543de82ef95) + role, bytes = 0, done;
	int64_t n, first;

	(void)problem_span_bytes(p, role, &bytes, NULL);
	n = (int64_t)(bytes / fmha_dtype_bytes(dtype));
	first = n < RECIPE_FILL_BLOCK + 37 ? n : RECIPE_FILL_BLOCK + 37;
	for (int64_t i = 0; i < first; i++)
		reference_store(data, dtype, i,
				value_of(recipe, role, &state, i) * recipe_spread(p, role));
	for (done = (uint64_t)first * fmha_dtype_bytes(dtype); done < bytes;) {
		uint64_t part = bytes - done < done ? bytes - done : done;

		memcpy(data + done, data, part);
		done += part;
	}
}

/* Codes and factors whose products are about 1; large ones repeat, as tensors do. */
void recipe_fill_latents(uint8_t *data, uint64_t bytes, uint64_t *state)
{
	const uint64_t fresh = RECIPE_FILL_BLOCK / FMHA_LATENT_BYTES * FMHA_LATENT_BYTES;
	uint64_t done = 0;

	for (; done + FMHA_LATENT_BYTES <= (bytes < fresh ? bytes : fresh);
	     done += FMHA_LATENT_BYTES) {
		uint8_t *at = data + done;

		for (int d = 0; d < ABI_LATENT_CODES; d++)
			reference_store(at, FMHA_E4M3, d, 100 * random_normal(state));
		for (int i = 0; i < ABI_LATENT_CODES / ABI_LATENT_BLOCK; i++)
			reference_store(at + ABI_LATENT_FACTORS, FMHA_F32, i,
					0.005 + 0.01 * random_uniform(state));
		for (int d = 0; d < 576 - ABI_LATENT_CODES; d++)
			reference_store(at + ABI_LATENT_REST, FMHA_BF16, d, random_normal(state));
	}
	for (uint64_t part; done > 0 && done < bytes; done += part) {
		part = bytes - done < done ? bytes - done : done;
		memcpy(data + done, data, part);
	}
}

static void fill_latent_cache(const struct recipe *recipe, uint8_t *data)
{
	uint64_t state = recipe->seed * UINT64_C(0xd1342543de82ef95) + FMHA_T_K, bytes = 0;

	(void)problem_span_bytes(&recipe->problem, FMHA_T_K, &bytes, NULL);
	recipe_fill_latents(data, bytes, &state);
}

void recipe_fill(const struct recipe *recipe, const struct tensors *tensors)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		void *data = tensors_data(tensors, role);

		if (!data || recipe_is_result(&recipe->problem, role))
			continue;
		if (recipe->indices[role])
			tensors_put_integers(data, recipe->problem.tensor[role].dtype,
					     recipe->indices[role], recipe->n_indices[role]);
		else if (role == FMHA_T_K && recipe->problem.kv_layout == FMHA_KV_LATENT_FP8)
			fill_latent_cache(recipe, data);
		else
			fill_role(recipe, role, data);
	}
}
