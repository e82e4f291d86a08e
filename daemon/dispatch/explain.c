/* SPDX-License-Identifier: MIT */
/*
 * explain.c: why this plan. One JSON document:
 *
 *   {"arch": "gfx942", "compute_units": 304, "op": "forward",
 *    "plan": {"stages": [{"family", "kernel", "pipeline", "arch", "grid", "block", "lds_bytes",
 *                         "workspace_offset", "workspace_bytes"}],
 *             "workspace_bytes", "run_workspace_bytes", "workspace_head_bytes", "dq_acc_bytes", "workspace_zero",
 *             "n_splits", "split_size", "shares", "split_why", "dq_splits",
 *             "dq_split_keys", "kv_parts", "flops", "bytes"},
 *    "strategies": [{"name", "about"}],
 *    "selections": [{"family", "signature": {...}, "shape", "n_candidates", "n_rejected",
 *                    "chosen": "...", "decided_by": "heuristic", "why": "...",
 *                    "candidates": [{"name", "verdict": "chosen" | "passed over" | "set aside" |
 *                                    "rejected", "reason", "cost", "tuned_us", "nearby_us",
 *                                    "predicted_us", "time", "time_from", "priority"}]}]}
 *
 * Times are microseconds: measured at this shape, at the nearest one that was, predicted by the model.
 * "time" is what counts, "time_from" where it comes from (estimate.c); from the formula alone it is a
 * cost without a unit.
 *
 * Selections come in the order in which they were made. One without a choice was an attempt:
 * split-KV before the unsplit kernel, or a backward pipeline that writes dQ itself.
 */
#include <stdlib.h>
#include <string.h>

#include <json/json.h>

#include "planner.h"
#include "predict.h"

static void add_signature(cJSON *to, const struct spec_catalog *catalog,
			  const struct kernel_signature *signature)
{
	cJSON *object = cJSON_AddObjectToObject(to, "signature");
	struct kernel_spec spec;

	spec_init(&spec);
	spec.signature = *signature;
	for (int i = 0; i < SPEC_N_FIELDS; i++) {
		enum spec_field field = (enum spec_field)i;
		int64_t value = spec_get(&spec, field);
		const char *word = spec_word(catalog, field, value);

		if (!select_explains(field))
			continue;
		if (word)
			cJSON_AddStringToObject(object, spec_field_name(field), word);
		else
			cJSON_AddNumberToObject(object, spec_field_name(field), (double)value);
	}
}

static cJSON *add_candidate(cJSON *list, const struct spec_catalog *catalog,
			    const struct candidate *c, bool chosen)
{
	cJSON *object = json_add_item(list);
	char name[SPEC_NAME_BYTES];

	(void)spec_name_format(catalog, &c->spec, name);
	cJSON_AddStringToObject(object, "name", name);
	cJSON_AddStringToObject(object, "verdict",
				chosen         ? "chosen"
				: !c->accepted ? "rejected"
				: c->spills    ? "set aside"
					       : "passed over");
	if (c->reason[0])
		cJSON_AddStringToObject(object, "reason", c->reason);
	if (c->accepted)
		cJSON_AddNumberToObject(object, "cost", c->cost);
	if (c->tuned_us > 0)
		cJSON_AddNumberToObject(object, "tuned_us", c->tuned_us);
	if (c->nearby_us > 0)
		cJSON_AddNumberToObject(object, "nearby_us", c->nearby_us);
	if (c->predicted_us > 0)
		cJSON_AddNumberToObject(object, "predicted_us", c->predicted_us);
	if (c->accepted) {
		cJSON_AddNumberToObject(object, "time", c->time);
		cJSON_AddStringToObject(object, "time_from", plan_basis_name(estimate_basis(c)));
	}
	if (c->info.priority)
		cJSON_AddNumberToObject(object, "priority", c->info.priority);
	if (c->info.preferred)
		cJSON_AddTrueToObject(object, "preferred");
	return object;
}

static void add_feature_names(cJSON *to)
{
	cJSON *list = cJSON_AddArrayToObject(to, "features");

	for (int i = 0; i < PREDICT_FEATURES; i++)
		cJSON_AddItemToArray(list, cJSON_CreateString(predict_feature_name(i)));
}

static void add_features(cJSON *to, const struct select_stage *stage, const struct candidate *c)
{
	double features[PREDICT_FEATURES];
	cJSON *list = cJSON_AddArrayToObject(to, "features");

	predict_features(stage, registry_catalog(stage->device->registry), c, features);
	for (int i = 0; i < PREDICT_FEATURES; i++)
		cJSON_AddItemToArray(list, cJSON_CreateNumber(features[i]));
}

static const char *why_of(const struct select_report *selection)
{
	if (selection->found_none)
		return "no spec of this device has the signature: the device chooses by itself";
	if (selection->chosen < 0)
		return "every candidate was rejected";
	for (size_t i = 0; i < select_n_strategies; i++)
		if (select_strategies[i].name == selection->strategy)
			return select_strategies[i].about;
	return strcmp(selection->strategy, SELECT_BY_NAME) == 0 ? "the caller named it"
								: "the only candidate that fits";
}

struct explanation {
	struct plan_report report; /* first */
	cJSON *selections;
};

static void add_selection(struct plan_report *report, const struct select_stage *stage,
			  const struct plan_stage *chosen, const struct select_report *selection)
{
	const struct explanation *explanation = (const struct explanation *)report;
	const struct spec_catalog *catalog = registry_catalog(stage->device->registry);
	cJSON *object = json_add_item(explanation->selections), *list;

	cJSON_AddStringToObject(object, "family", plan_family_name(stage->family));
	add_signature(object, catalog, &selection->signature);
	cJSON_AddStringToObject(object, "shape", report->shape);
	cJSON_AddNumberToObject(object, "n_candidates", (double)selection->n);
	cJSON_AddNumberToObject(object, "n_rejected", (double)selection->n_rejected);
	if (chosen) {
		cJSON_AddStringToObject(object, "chosen", chosen->kernel);
		cJSON_AddStringToObject(object, "decided_by", selection->strategy);
	} else {
		cJSON_AddNullToObject(object, "chosen");
	}
	cJSON_AddStringToObject(object, "why", why_of(selection));
	list = cJSON_AddArrayToObject(object, "candidates");
	if (stage->device->explain_features)
		add_feature_names(object);
	for (size_t i = 0; i < selection->n; i++) {
		const struct candidate *c = &selection->candidates[i];
		cJSON *item = add_candidate(list, catalog, c,
					    chosen && (long)i == selection->chosen);

		if (stage->device->explain_features && c->accepted)
			add_features(item, stage, c);
	}
}

static void add_dims(cJSON *to, const char *name, const uint32_t dims[3])
{
	cJSON *list = cJSON_AddArrayToObject(to, name);

	for (int i = 0; i < 3; i++)
		cJSON_AddItemToArray(list, cJSON_CreateNumber(dims[i]));
}

/* Of packed sequences whose lengths are known. */
static void add_run_bytes(cJSON *object, const struct plan *plan, int32_t *const *integers)
{
	struct index_tables tables;

	if (!integers || !plan_workspace_varies(plan))
		return;
	tables = (struct index_tables){.seqstart_q = integers[FMHA_T_SEQSTART_Q],
				       .seqstart_k = integers[FMHA_T_SEQSTART_K],
				       .seqlen_k = integers[FMHA_T_SEQLEN_K]};
	if (tables.seqstart_q)
		cJSON_AddNumberToObject(
			object, "run_workspace_bytes",
			(double)(plan->layout.dq_acc + bwd_workspace_dq_acc(plan, &tables)));
}

static void add_plan(cJSON *to, const struct plan *plan, const char *split_why,
		     int32_t *const *integers)
{
	cJSON *object = cJSON_AddObjectToObject(to, "plan");
	cJSON *stages = cJSON_AddArrayToObject(object, "stages");

	for (uint32_t i = 0; i < plan->n_stages; i++) {
		const struct plan_stage *stage = &plan->stages[i];
		cJSON *item = json_add_item(stages);

		cJSON_AddStringToObject(item, "family", plan_family_name(stage->family));
		cJSON_AddStringToObject(item, "kernel", stage->kernel);
		cJSON_AddStringToObject(item, "pipeline", stage->pipeline);
		cJSON_AddStringToObject(item, "arch", stage->arch);
		cJSON_AddBoolToObject(item, "general", stage->is_general != 0);
		add_dims(item, "grid", stage->launch.grid);
		add_dims(item, "block", stage->launch.block);
		cJSON_AddNumberToObject(item, "lds_bytes", stage->launch.lds_bytes);
		cJSON_AddNumberToObject(item, "workspace_offset", (double)stage->workspace_offset);
		cJSON_AddNumberToObject(item, "workspace_bytes", (double)stage->workspace_bytes);
	}
	cJSON_AddNumberToObject(object, "workspace_bytes", (double)plan->workspace_bytes);
	add_run_bytes(object, plan, integers);
	cJSON_AddNumberToObject(object, "workspace_head_bytes", (double)plan->workspace_head_bytes);
	cJSON_AddNumberToObject(object, "dq_acc_bytes", (double)plan->dq_acc_bytes);
	cJSON_AddBoolToObject(object, "workspace_zero", plan->workspace_zero != 0);
	cJSON_AddNumberToObject(object, "n_splits", plan->n_splits);
	cJSON_AddNumberToObject(object, "split_size", plan->split_size);
	cJSON_AddBoolToObject(object, "shares", plan->shares);
	cJSON_AddBoolToObject(object, "widens", plan->widens != 0);
	cJSON_AddNumberToObject(object, "few_rows", plan->few ? plan->few_rows : 0);
	cJSON_AddNumberToObject(object, "few_parts", plan->few ? plan->few_parts : 0);
	cJSON_AddNumberToObject(object, "wide_places", plan->few ? plan->wide_places : 0);
	cJSON_AddStringToObject(object, "split_why", split_why);
	cJSON_AddNumberToObject(object, "dq_splits", plan->dq_splits);
	cJSON_AddNumberToObject(object, "dq_split_keys", plan->dq_split_keys);
	cJSON_AddNumberToObject(object, "kv_parts", plan->kv_parts);
	cJSON_AddNumberToObject(object, "flops", plan->flops);
	cJSON_AddNumberToObject(object, "bytes", (double)plan->bytes);
}

static void add_error(cJSON *to, const struct fmha_error *err)
{
	cJSON *object = cJSON_AddObjectToObject(to, "error");

	cJSON_AddNullToObject(to, "plan");
	cJSON_AddNumberToObject(object, "code", err->code);
	cJSON_AddStringToObject(object, "name", fmha_error_name(err->code));
	cJSON_AddStringToObject(object, "field", err->field);
	cJSON_AddStringToObject(object, "message", err->msg);
}

int plan_explain(const struct fmha_problem *problem, const struct plan_choice *choice,
		 const struct plan_device *device, char **ret_json, struct fmha_error *err)
{
	cJSON *root, *strategies;
	struct explanation explanation = {.report = {.selected = add_selection}};
	struct fmha_error why = {0};
	struct plan plan;
	char *text = NULL;
	int r;

	json_begin();
	root = cJSON_CreateObject();
	explanation.selections = cJSON_CreateArray();
	r = plan_build_reported(problem, choice, device, &plan, &explanation.report, &why);
	if (r < 0 && r != FMHA_ENOKERNEL) {
		if (err)
			*err = why;
		goto end;
	}
	cJSON_AddStringToObject(root, "arch", device->arch);
	cJSON_AddNumberToObject(root, "compute_units", device->compute_units);
	cJSON_AddStringToObject(root, "op", problem_op_name(problem->op));
	if (r == 0)
		add_plan(root, &plan, explanation.report.split_why, device->explain_integers);
	else
		add_error(root, &why);
	strategies = cJSON_AddArrayToObject(root, "strategies");
	for (size_t i = 0; i < select_n_strategies; i++) {
		cJSON *item = json_add_item(strategies);

		cJSON_AddStringToObject(item, "name", select_strategies[i].name);
		cJSON_AddStringToObject(item, "about", select_strategies[i].about);
	}
	cJSON_AddItemToObject(root, "selections", explanation.selections);
	r = 0;
end:
	text = json_end(root, true);
	if (r == 0 && text) {
		*ret_json = text;
		return 0;
	}
	free(text);
	return r < 0 ? r : fmha_error_set(err, FMHA_ENOMEM, "explain: out of memory");
}
