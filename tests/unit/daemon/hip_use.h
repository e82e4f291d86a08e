/* SPDX-License-Identifier: MIT */
/* hip_use.h: the device layer on the libamdhip64 without a GPU (tests/gpu/stub/hip_fake.h), as a worker uses it. */
#ifndef FMHA_TESTS_HIP_USE_H
#define FMHA_TESTS_HIP_USE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <base/clock.h>
#include <device/device.h>

#define BYTES    65536u
#define PATIENCE (20 * NS_PER_S)
#define PEER     "--peer"

/* Of the fake. */
extern void (*fake_set)(const char *variable, const char *value);
extern long (*fake_count)(const char *name);

struct peer {
	pid_t pid;
	int to, from;
};

struct shared {
	uint8_t handle[64];
	uint64_t address;
};

struct use {
	struct device *device;
	struct device_build *build;
	struct device_waiter waiter;
	const struct device_kernel *kernel;
	struct device_memory memfd, imported, workspace, staging;
	struct device_stream *stream;
	struct device_launch *launch;
	struct launch_record record;
	union abi_args args;
	bool ready, done;
	struct fmha_error error; /* the first */
};

/* Ends the attempt at the first failure. */
#define TRY(use, call)                                                                             \
	do {                                                                                       \
		struct fmha_error err = {0};                                                       \
                                                                                                   \
		if ((call) < 0) {                                                                  \
			note(use, &err);                                                           \
			return;                                                                    \
		}                                                                                  \
	} while (0)

void find_fake(void);
void tell_nothing(void);
void assert_nothing_is_left(const char *when);
void be_peer(int in, int out);
struct peer start_peer(void);
struct shared ask_peer(const struct peer *peer, char what);
void end_peer(const struct peer *peer);
bool collect(struct use *use);
void submit(struct use *use);
int memfd_of(size_t bytes);
int import(struct use *use, uint32_t kind, int fd, const uint8_t *handle, uint64_t size,
	   struct device_memory *ret_memory, struct fmha_error *err);
void load_kernel(struct use *use);
void get_memory(struct use *use, const uint8_t *handle);
void fill_launch(struct use *use);
void give_back(struct use *use);
struct fmha_error use_device(const uint8_t *handle);
struct use *opened(void);

#endif
