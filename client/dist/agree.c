/* SPDX-License-Identifier: MIT */
/* agree.c: what goes wrong on one rank, and how all ranks get to know. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

int dist_fail(struct fmha_error *err, int code, const char *field, const char *format, ...)
{
	va_list arguments;

	if (!err)
		return code;
	err->code = code;
	(void)snprintf(err->field, sizeof(err->field), "%s", field);
	va_start(arguments, format);
	(void)vsnprintf(err->msg, sizeof(err->msg), format, arguments);
	va_end(arguments);
	return code;
}

int dist_mpi(struct fmha_error *err, int code)
{
	char said[MPI_MAX_ERROR_STRING] = "";
	int n = 0;

	if (code == MPI_SUCCESS)
		return 0;
	(void)MPI_Error_string(code, said, &n);
	return dist_fail(err, FMHA_EIO, "", "MPI: %.200s", said);
}

void *dist_alloc(struct fmha_error *err, size_t n, size_t size)
{
	void *found = calloc(n ? n : 1, size);

	if (!found)
		(void)dist_fail(err, FMHA_ENOMEM, "", "%zu elements of %zu bytes: out of memory", n,
				size);
	return found;
}

int dist_agree(struct fmha_dist_plan *plan, int r, struct fmha_error *err)
{
	struct {
		int code, rank;
	} mine = {r, plan->rank}, worst;
	int said = dist_mpi(r ? NULL : err,
			    MPI_Allreduce(&mine, &worst, 1, MPI_2INT, MPI_MINLOC, plan->comm));

	if (r || said)
		return r ? r : said;
	if (worst.code)
		return dist_fail(err, FMHA_ECANCELED, "", "rank %d failed: %s", worst.rank,
				 fmha_error_sentence(worst.code));
	return 0;
}
