/* SPDX-License-Identifier: MIT */
/*
 * build.h: the order of one compile, as kernels/gpu makes it. It travels as it is, from the device that wants
 * the code over the message `compile` to the helper: plain data, borrowed by const pointer, copied by
 * assignment. Who waits for the code stands beside it. What it comes to, compile/build_identity.h says.
 */
#ifndef PROTO_BUILD_H
#define PROTO_BUILD_H

#include <stdint.h>

#define BUILD_NAME_BYTES 256
#define BUILD_WORD_BYTES 64
#define BUILD_OPTIONS    48

struct kernel_build {
	char name[BUILD_NAME_BYTES]; /* unique per code object: for messages and people */
	char arch[BUILD_WORD_BYTES];
	char source[BUILD_WORD_BYTES]; /* a file in the folder of kernel sources */
	uint32_t n_options;
	char options[BUILD_OPTIONS][BUILD_WORD_BYTES]; /* macros, -DNAME=VALUE */
};

#endif
