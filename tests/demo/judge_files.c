/* SPDX-License-Identifier: MIT */
/*
 * The demo's judge: one double-precision reference for any number of results.
 *
 *   fmha_demo_judge Q.npy K.npy V.npy OUT.npy...
 *
 * Prints "MAX_ERROR ALLOWED ok|WRONG" for each OUT.npy.
 */
#include <stdio.h>
#include <stdlib.h>

#include <fmha/fmha.h>

#include "judge.h"
#include "npy.h"

static void die(const char *what)
{
	(void)fprintf(stderr, "%s\n", what);
	exit(1);
}

static void take(const char *path, struct npy *npy, struct fmha_tensor *tensor)
{
	struct fmha_error err = {0};

	if (npy_read(path, npy, &err))
		die(err.msg);
	if (npy->n_dims != 4 || (npy->type != NPY_F4 && npy->type != NPY_U2))
		die("not [batch, seqlen, heads, hdim] of float32 or uint16");
	tensor->dtype = npy->type == NPY_F4 ? FMHA_F32 : FMHA_BF16;
	tensor->data = npy->data;
}

int main(int argc, char **argv)
{
	struct npy q, k, v, o;
	struct judge *judge = NULL;
	struct fmha_error err = {0};
	struct fmha_problem p;

	if (argc < 5)
		return 2;
	fmha_problem_init(&p);
	take(argv[1], &q, &p.q);
	take(argv[2], &k, &p.k);
	take(argv[3], &v, &p.v);
	p.batch = (int32_t)q.dims[0];
	p.seqlen_q = (int32_t)q.dims[1];
	p.nhead_q = (int32_t)q.dims[2];
	p.hdim_q = (int32_t)q.dims[3];
	p.seqlen_k = (int32_t)k.dims[1];
	p.nhead_k = (int32_t)k.dims[2];
	p.hdim_v = (int32_t)v.dims[3];
	for (int i = 4; i < argc; i++) {
		struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS];

		take(argv[i], &o, &p.o);
		if (o.bytes / (size_t)p.hdim_v != q.bytes / (size_t)p.hdim_q)
			die("an output has the wrong shape");
		if (!judge && judge_new(&p, &judge, &err))
			die(err.msg);
		(void)judge_compare(judge, &p, verdicts);
		(void)printf("%.9g %.9g %s\n", verdicts[0].max_error, verdicts[0].bar,
			     verdicts[0].ok ? "ok" : "WRONG");
		npy_deinit(&o);
	}
	judge = judge_free(judge);
	npy_deinit(&q);
	npy_deinit(&k);
	npy_deinit(&v);
	return 0;
}
