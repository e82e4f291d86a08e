/* SPDX-License-Identifier: MIT */
/* local_version.c: what a plan launches, made of what the daemon says and of code objects that it hands over. */
#include "local.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <kernels/launch_wire.h>
#include <proto/error.h>

#include "internal.h"

static int make_launch(const struct fmha_local_plan *plan, struct local_version *version,
		       const struct proto_launch *from, local_fetch fetch, void *owner,
		       struct fmha_error *err)
{
	uint32_t i = version->n_launches;
	struct launch_record *record = &version->launches[i].record;
	int r = launch_from_wire(from, plan->workspace_bytes, record, err);

	if (r < 0)
		return r;
	memcpy(version->launches[i].family, from->family, sizeof(from->family));
	memcpy(version->launches[i].kernel, from->kernel, sizeof(from->kernel));
	r = local_code_get(plan->runtime, record->code, fetch, owner, &version->launches[i].code,
			   err);
	if (r < 0)
		return r;
	version->n_launches++;
	return local_code_function(version->launches[i].code, record,
				   &version->launches[i].function, err);
}

struct local_version *local_version_free(struct local_version *version)
{
	struct local_version *older = version ? version->older : NULL;

	for (uint32_t i = version ? version->n_launches : 0; i-- > 0;)
		local_code_put(version->launches[i].code);
	free(version);
	return older;
}

int local_version_make(const struct fmha_local_plan *plan,
		       const struct proto_local_plan_result *result, local_fetch fetch, void *owner,
		       struct local_version **ret_version, struct fmha_error *err)
{
	struct local_version *version = calloc(1, sizeof(*version));
	int r = version ? 0 : fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");

	for (uint32_t i = 0; r == 0 && i < result->n_launches; i++)
		r = make_launch(plan, version, &result->launches[i], fetch, owner, err);
	if (r < 0) {
		(void)local_version_free(version);
		return r;
	}
	version->version = result->version;
	*ret_version = version;
	return 0;
}

#define CODE_SEALS (F_SEAL_SHRINK | F_SEAL_WRITE)

/* A file of the daemon's, which nobody can cut or change any more. */
static int map_code(int fd, uint64_t size, void **ret_data, struct fmha_error *err)
{
	int seals = fcntl(fd, F_GET_SEALS);
	struct stat st;

	*ret_data = MAP_FAILED;
	if (size > 0 && seals >= 0 && (seals & CODE_SEALS) == CODE_SEALS && fstat(fd, &st) == 0 &&
	    st.st_size >= 0 && (uint64_t)st.st_size >= size)
		*ret_data = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
	(void)close(fd);
	if (*ret_data != MAP_FAILED)
		return 0;
	return fmha_error_set(err, FMHA_EIO, "the daemon's code of %llu bytes cannot be mapped",
			      (unsigned long long)size);
}

int local_fetch_from_daemon(void *owner, const uint8_t hash[LAUNCH_HASH_BYTES], void **ret_data,
			    size_t *ret_bytes, struct fmha_error *err)
{
	const struct local_source *from = owner;
	struct proto_code_params params = {.hash_bytes = LAUNCH_HASH_BYTES};
	struct proto_code_result result;
	int fd = -1, r;

	memcpy(params.hash, hash, sizeof(params.hash));
	r = link_call(&from->device->worker, PROTO_CODE, &params, -1, from->deadline, &result, &fd,
		      err);
	if (r < 0)
		return r;
	*ret_bytes = result.size;
	return map_code(fd, result.size, ret_data, err);
}
