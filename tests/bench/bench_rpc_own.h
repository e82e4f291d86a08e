/* SPDX-License-Identifier: MIT */
/*
 * bench_rpc_own.h: what a program can do without a daemon on a device that a daemon serves: have
 * memory there, and launch something.
 */
#ifndef BENCH_RPC_OWN_H
#define BENCH_RPC_OWN_H

#include <stdbool.h>
#include <stdint.h>

#include <fmha/fmha.h>

struct own_device {
	void *library; /* libcuda, libamdhip64; NULL: the CPU */
	void *stream, *memory;
	void *function; /* NULL: a memset stands for a launch */
};

/* @backend: "cpu", "fake", "cuda", "hip"; the first GPU that this process sees. Exits on failure.
 */
void own_device_open(struct own_device *own, const char *backend);
bool own_device_is_gpu(const struct own_device *own);

/* A new allocation of at least @bytes, as fmha_buffer_import() wants it. Never freed. */
void own_memory(struct own_device *own, uint64_t bytes, struct fmha_memory *ret_memory);

/* Launches a kernel that does nothing and waits for its end. GPUs only. */
void own_launch(struct own_device *own);

#endif
