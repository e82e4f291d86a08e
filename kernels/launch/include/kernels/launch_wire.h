/* SPDX-License-Identifier: MIT */
/*
 * launch_wire.h: a launch record as it travels. The workspace is the only base that is no tensor:
 * whoever sends a record has moved what else it points into there (launch_rebase()).
 */
#ifndef FMHA_LAUNCH_WIRE_H
#define FMHA_LAUNCH_WIRE_H

#include <kernels/launch.h>
#include <proto/messages.h>

/* All but family and kernel. Return: 0, or FMHA_EINTERNAL: it points elsewhere. */
int launch_to_wire(const struct launch_record *record, struct proto_launch *ret_launch,
		   struct fmha_error *err);

/*
 * Judges what came: binding and launching the record touches nothing but its arguments, pointers
 * with a base lie within the arguments, ranges within @workspace_bytes.
 * Return: 0; FMHA_EPROTO: malformed; FMHA_ENOTSUP: more than this build knows of.
 */
int launch_from_wire(const struct proto_launch *launch, uint64_t workspace_bytes,
		     struct launch_record *ret_record, struct fmha_error *err);

#endif
