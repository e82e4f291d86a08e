/* SPDX-License-Identifier: MIT */
/*
 * naming.c: kernels that the caller names. A name says its family and so its stage; there, it is
 * the only candidate that is allowed, and goes through the same checks as when it is chosen. The
 * reason of its last rejection is kept: a stage may be tried in more than one form.
 */
#include <stdio.h>
#include <string.h>

#include <proto/error.h>

#include "select.h"

static const char field[] = "kernels";

int naming_init(struct naming *naming, const struct plan_choice *choice,
		const struct plan_device *device, struct fmha_error *err)
{
	*naming = (struct naming){0};
	if (!choice || choice->n == 0)
		return 0;
	if (!device->registry)
		return fmha_error_set_field(err, FMHA_ENOTSUP, field,
					    "kernels: %s has none with names", device->arch);
	for (uint32_t i = 0; i < choice->n && i < PLAN_MAX_STAGES; i++) {
		struct select_named *named = &naming->named[i];
		struct fmha_error why = {0};

		if (registry_find(device->registry, choice->kernel[i], &named->spec, NULL, &why) <
		    0)
			return fmha_error_set_field(err, FMHA_EINVAL, field, "kernels: %s",
						    why.msg);
		if (naming_of(naming, (enum abi_family)named->spec.signature.family))
			return fmha_error_set_field(
				err, FMHA_EINVAL, field, "kernels: two are of %s",
				plan_family_name((enum abi_family)named->spec.signature.family));
		naming->n++;
	}
	return 0;
}

struct select_named *naming_of(struct naming *naming, enum abi_family family)
{
	for (uint32_t i = 0; i < naming->n; i++)
		if (naming->named[i].spec.signature.family == family)
			return &naming->named[i];
	return NULL;
}

/* Of @signature's fields the first that @spec has another value in, as a sentence. */
static void say_difference(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			   const struct kernel_signature *signature,
			   char reason[SELECT_REASON_BYTES])
{
	struct kernel_spec wanted = *spec;

	wanted.signature = *signature;
	(void)snprintf(reason, SELECT_REASON_BYTES, "the problem is of another signature");
	for (size_t i = 0; i < signature_n_fields; i++) {
		enum spec_field at = signature_fields[i];
		int64_t has = spec_get(spec, at), wants = spec_get(&wanted, at);
		const char *has_word = spec_word(catalog, at, has);
		const char *wants_word = spec_word(catalog, at, wants);
		/* Head dims may be larger: that is for the pads to judge. */
		bool is_dim = at == SPEC_FIELD_hdim_q || at == SPEC_FIELD_hdim_v;

		if (has == wants || (is_dim && has > wants))
			continue;
		if (has_word && wants_word)
			(void)snprintf(reason, SELECT_REASON_BYTES, "%s %s: the problem's is %s",
				       spec_field_name(at), has_word, wants_word);
		else
			(void)snprintf(reason, SELECT_REASON_BYTES,
				       "%s %lld: the problem's is %lld", spec_field_name(at),
				       (long long)has, (long long)wants);
		return;
	}
}

void naming_refuse(const struct select_stage *stage, const struct select_report *report)
{
	struct select_named *named = stage->named;

	for (size_t i = 0; i < report->n; i++)
		if (spec_compare(&report->candidates[i].spec, &named->spec) == 0) {
			memcpy(named->reason, report->candidates[i].reason, sizeof(named->reason));
			return;
		}
	say_difference(registry_catalog(stage->device->registry), &named->spec, &report->signature,
		       named->reason);
}

static bool runs_a_stage(const struct select_named *named, struct plan *plan)
{
	for (uint32_t i = 0; i < plan->n_stages; i++)
		if (plan->stages[i].has_spec &&
		    spec_compare(&plan->stages[i].spec, &named->spec) == 0) {
			plan->named |= 1U << i;
			return true;
		}
	return false;
}

int naming_settle(const struct naming *naming, struct plan *plan, int r, struct fmha_error *err)
{
	/* A problem that writes nothing has no use for any kernel. */
	for (uint32_t i = 0; i < naming->n && (r < 0 || plan->n_stages > 0); i++) {
		const struct select_named *named = &naming->named[i];
		const char *family = plan_family_name(
			(enum abi_family)named->spec.signature.family);

		if (runs_a_stage(named, plan))
			continue;
		if (named->reason[0])
			return fmha_error_set_field(err, FMHA_ENOKERNEL, field,
						    "kernels: the %s that is named: %s", family,
						    named->reason);
		if (r == 0)
			return fmha_error_set_field(err, FMHA_EINVAL, field,
						    "kernels: this plan has no %s", family);
	}
	return r;
}

void plan_chosen(const struct plan *plan, struct plan_choice *ret_choice)
{
	ret_choice->n = 0;
	for (uint32_t i = 0; i < plan->n_stages; i++)
		if (plan->named & 1U << i)
			memcpy(ret_choice->kernel[ret_choice->n++], plan->stages[i].kernel,
			       sizeof(plan->stages[i].kernel));
}
