/* SPDX-License-Identifier: MIT */
/* client.h: what all public functions ask of the connection to the front. */
#ifndef CLIENT_CLIENT_H
#define CLIENT_CLIENT_H

#include "internal.h"

struct fmha_client *client_ref(struct fmha_client *client);
struct fmha_client *client_unref(struct fmha_client *client);

static inline bool client_in_child(const struct fmha_client *client)
{
	return client->process != process_token();
}

/* Return: 0, or FMHA_ECONN in a process that the client does not belong to. */
static inline int client_check_process(const struct fmha_client *client, struct fmha_error *err)
{
	if (!client_in_child(client))
		return 0;
	return fmha_error_set(err, FMHA_ECONN,
			      "the connection belongs to process %d: a forked child opens its own",
			      (int)client->pid);
}

/* The same of a public function; @client: NULL: one of its arguments is. */
static inline int client_check(const struct fmha_client *client, const char *function,
			       struct fmha_error *err)
{
	if (client)
		return client_check_process(client, err);
	(void)fmha_error_set(err, FMHA_EINVAL, "%s: an argument is NULL", function);
	return FMHA_EINVAL; /* here, where analyzers see that it is negative */
}
/* A caller's word as a message has it. Return: 0, or FMHA_EINVAL: longer than @capacity holds. */
int client_copy_name(char *to, size_t capacity, const char *from, const char *field,
		     struct fmha_error *err);

static inline int64_t client_deadline(const struct fmha_client *client)
{
	return deadline_after_ms(client->timeout_ms);
}

#define JSON_MAX_BYTES (UINT64_C(256) << 20)

/* link_call() of a method that answers with a JSON document. @ret_json: given. */
int client_call_json(struct fmha_client *client, struct link *link, enum proto_method method,
		     const void *params, char **ret_json, struct fmha_error *err);
/* The same of a device's worker. */
int device_call_json(struct fmha_device *device, enum proto_method method, const void *params,
		     char **ret_json, struct fmha_error *err);

void device_info_from(const struct proto_device *from, struct fmha_device_info *ret_info);

#endif
