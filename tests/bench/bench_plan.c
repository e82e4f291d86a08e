/* SPDX-License-Identifier: MIT */
/*
 * What choosing kernels costs a plan that is new, in this process' own time: by the cost formula, and
 * by the model of the arch's times, which weighs every number of splits.
 *
 *   bench_plan [ARCH]      sm_90a unless said
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <dispatch/model.h>
#include <dispatch/plan.h>
#include <catalogue/backends.h>
#include <proto/error.h>
#include <proto/problem.h>
#include <registry/registry.h>
#include <specs/backend.h>

#define N_PLANS 200

static const struct {
	const char *name;
	uint32_t op;
	int32_t batch, nhead_q, nhead_k, seqlen_q, seqlen_k, hdim;
} cases[] = {
	{"forward, 4k", FMHA_FORWARD, 2, 16, 16, 4096, 4096, 128},
	{"forward, 512", FMHA_FORWARD, 1, 16, 16, 512, 512, 128},
	{"decode, 8 x 32k", FMHA_FORWARD, 8, 32, 8, 1, 32768, 128},
	{"backward, 4k", FMHA_BACKWARD, 2, 16, 16, 4096, 4096, 128},
};
#define N_CASES (sizeof(cases) / sizeof(cases[0]))

static double now_us(void)
{
	struct timespec time;

	(void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
	return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

_Noreturn static void die(const char *what, const struct fmha_error *err)
{
	(void)fprintf(stderr, "bench_plan: %s: %s\n", what, err->msg);
	exit(1);
}

static void make_problem(size_t i, struct fmha_problem *problem)
{
	static const enum fmha_tensor_role roles[] = {FMHA_T_Q,  FMHA_T_K,  FMHA_T_V,
						      FMHA_T_O,  FMHA_T_DO, FMHA_T_DQ,
						      FMHA_T_DK, FMHA_T_DV, FMHA_T_LSE};
	size_t n = cases[i].op == FMHA_BACKWARD ? sizeof(roles) / sizeof(roles[0]) : 4;

	fmha_problem_init(problem);
	problem->op = cases[i].op;
	problem->batch = cases[i].batch;
	problem->nhead_q = cases[i].nhead_q;
	problem->nhead_k = cases[i].nhead_k;
	problem->seqlen_q = cases[i].seqlen_q;
	problem->seqlen_k = cases[i].seqlen_k;
	problem->hdim_q = problem->hdim_v = cases[i].hdim;
	for (size_t k = 0; k < n; k++)
		problem->tensor[roles[k]] = (struct fmha_tensor){
			.buffer = k + 1, .dtype = roles[k] == FMHA_T_LSE ? FMHA_F32 : FMHA_BF16};
}

/* Microseconds a plan. */
static double time_plans(const struct plan_device *device, size_t i)
{
	static struct plan plan;
	const struct plan_choice any = {0};
	struct fmha_problem problem;
	struct fmha_error err = {0};
	double begin = 0;

	make_problem(i, &problem);
	for (int k = 0; k <= N_PLANS; k++) {
		if (k == 1)
			begin = now_us(); /* the first finds everything cold */
		if (plan_build(&problem, &any, device, &plan, &err) < 0)
			die(cases[i].name, &err);
	}
	return (now_us() - begin) / N_PLANS;
}

int main(int argc, char **argv)
{
	const char *arch = argc > 1 ? argv[1] : "sm_90a";
	struct registry_device model = {0};
	struct predict_model *times = NULL;
	const struct spec_backend_arch *about;
	struct spec_catalog *catalog = NULL;
	struct plan_device device;
	struct registry *registry = NULL;
	struct fmha_error err = {0};

	(void)snprintf(model.name, sizeof(model.name), "%s", arch);
	registry_device_archs(&model, arch);
	if (spec_catalog_own(fmha_backends, &catalog, &err) < 0 ||
	    registry_new(catalog, &model, &registry, &err) < 0 ||
	    predict_model_load(arch, &times, &err) < 0)
		die(arch, &err);
	about = spec_arch_model(catalog, spec_arch_find(catalog, arch));
	device = (struct plan_device){.arch = arch,
				      .registry = registry,
				      .compute_units = about->units,
				      .lds_bytes = about->lds_bytes,
				      .wave = about->wave};
	(void)printf("%-18s %12s %12s %8s\n", arch, "formula us", "model us", "ratio");
	for (size_t i = 0; i < N_CASES; i++) {
		double formula, modelled = 0;

		device.model = NULL;
		formula = time_plans(&device, i);
		device.model = times;
		if (times)
			modelled = time_plans(&device, i);
		(void)printf("%-18s %12.1f %12.1f %8.2f\n", cases[i].name, formula, modelled,
			     modelled / formula);
	}
	if (!times)
		(void)puts("no model of its times is there");
	predict_model_free(times);
	registry_free(registry);
	spec_catalog_free(catalog);
	return 0;
}
