/* SPDX-License-Identifier: MIT */
#include "job.h"

#include <stdlib.h>
#include <string.h>

#include "cleanup.h"

#define MAX_PARTS 300

struct compile_job *job_free(struct compile_job *job)
{
	if (!job)
		return NULL;
	for (size_t i = 0; job->options && i < job->request.n_options; i++)
		free(job->options[i]);
	free(job->options);
	free((char *)job->request.kernel);
	free((char *)job->request.arch);
	free((char *)job->request.compiler);
	free((char *)job->request.source);
	free(job);
	return NULL;
}

struct cache_key job_identity(const struct compile_request *request)
{
	struct cache_key_part parts[MAX_PARTS];
	const char *compiler = request->compiler ? request->compiler : "";
	size_t n = 0;

	parts[n++] = (struct cache_key_part){request->arch, strlen(request->arch)};
	parts[n++] = (struct cache_key_part){compiler, strlen(compiler)};
	parts[n++] = (struct cache_key_part){request->source, strlen(request->source)};
	for (size_t i = 0; i < request->n_options && n < MAX_PARTS; i++)
		parts[n++] = (struct cache_key_part){request->options[i],
						     strlen(request->options[i])};
	return cache_key_of(parts, n);
}

struct compile_job *job_new(const struct compile_request *request)
{
	_cleanup_(job_freep) struct compile_job *job = calloc(1, sizeof(*job));
	struct compile_job *made;

	if (!job)
		return NULL;
	job->identity = job_identity(request);
	job->options = calloc(request->n_options + 1, sizeof(*job->options));
	job->request.uid = request->uid;
	job->request.kernel = strdup(request->kernel);
	job->request.arch = strdup(request->arch);
	job->request.source = strdup(request->source);
	if (!job->options || !job->request.kernel || !job->request.arch || !job->request.source)
		return NULL;
	if (request->compiler && !(job->request.compiler = strdup(request->compiler)))
		return NULL;
	for (size_t i = 0; i < request->n_options; i++, job->request.n_options++)
		if (!(job->options[i] = strdup(request->options[i])))
			return NULL;
	job->request.options = (const char *const *)job->options;
	made = job;
	job = NULL;
	return made;
}
