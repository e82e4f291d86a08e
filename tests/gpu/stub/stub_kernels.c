/* SPDX-License-Identifier: MIT */
#include "stub_kernels.h"

#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "prepare_on_host.h"

static union abi_args last_args;

const void *stub_kernel_arguments(void)
{
	return &last_args;
}

static int takes_q(const char *function)
{
	static const char *const names[] = {"fmha_fwd", "fmha_fwd_splitkv", "fmha_fwd_pagedkv",
					    "fmha_batch_prefill"};
	int found = 0;

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		found |= strcmp(function, names[i]) == 0;
	return found;
}

/* q and o are of one size: f32, head dims alike and side by side. */
static int is_plain(const struct abi_fwd_args *fwd)
{
	return fwd->dtype == ABI_F32 && fwd->hdim_q == fwd->hdim_v &&
	       fwd->q.stride_seq == (abi_i64)fwd->nhead_q * fwd->hdim_q;
}

static void do_word(const struct abi_word_args *args)
{
	if (args->writes)
		__atomic_store_n(args->word, args->value, __ATOMIC_RELEASE);
	while (!args->writes &&
	       (abi_i32)(__atomic_load_n(args->word, __ATOMIC_ACQUIRE) - args->value) < 0)
		(void)usleep(200);
}

void stub_kernel_run(const char *function, const union abi_args *args)
{
	const struct abi_fwd_args *fwd = &args->fwd;
	const struct abi_sequences *s = &fwd->sequences;
	const size_t rows = s->seqstart_q ? (size_t)s->total_q
					  : (size_t)s->batch * (size_t)s->seqlen_q_max;

	if (strcmp(function, "fmha_prepare") == 0)
		prepare_on_host(&args->prepare);
	else if (strcmp(function, "fmha_word") == 0)
		do_word(&args->word);
	else
		last_args = *args;
	if (takes_q(function) && is_plain(fwd))
		memcpy(fwd->o.data, fwd->q.data,
		       rows * (size_t)fwd->nhead_q * (size_t)fwd->hdim_q * 4);
}
