/* SPDX-License-Identifier: MIT */
/*
 * fake.c: the CPU device with faults on command, so that supervision and recovery can be tested on
 * a machine where nothing else fails. Method "inject" arranges that after so many more launches one
 *
 *   hang     never ends, on all threads of the device;
 *   abort    calls abort(), as ROCr does on a GPU page fault;
 *   segv     writes to address 0;
 *   oom      fails with FMHA_ENOMEM, and the next one works again;
 *   sticky   fails, and so does every later one: the device is beyond use;
 *   block    blocks the worker's loop, like a driver call that does not return.
 */
#include "cpu_device.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <proto/error.h>

enum fake_fault {
	FAULT_NONE,
	FAULT_HANG,
	FAULT_ABORT,
	FAULT_SEGV,
	FAULT_OOM,
	FAULT_STICKY,
	FAULT_BLOCK,
	N_FAULTS
};

static const char *const fault_names[N_FAULTS] = {
	[FAULT_HANG] = "hang", [FAULT_ABORT] = "abort",   [FAULT_SEGV] = "segv",
	[FAULT_OOM] = "oom",   [FAULT_STICKY] = "sticky", [FAULT_BLOCK] = "block",
};

static struct device_ops fake_ops; /* the CPU's with the four functions below */

static struct cpu_device *fake_device(struct device *device)
{
	return container_of(device, struct cpu_device, base);
}

static void hang(const struct pool_step *step, uint64_t task, void *scratch)
{
	(void)step;
	(void)task;
	(void)scratch;
	for (;;)
		pause();
}

static void die(const struct pool_step *step, uint64_t task, void *scratch)
{
	(void)step;
	(void)task;
	(void)scratch;
	abort();
}

__attribute__((no_sanitize("undefined"))) /* it is meant */
static void
write_null(const struct pool_step *step, uint64_t task, void *scratch)
{
	(void)step;
	(void)task;
	(void)scratch;
	*(volatile int *)NULL = 0; /* NOLINT(clang-analyzer-core.NullDereference) */
}

static void submit_faulty(struct cpu_device *cpu, struct cpu_launch *launch, uint32_t fault)
{
	struct device_launch *base = &launch->base;

	switch (fault) {
	case FAULT_OOM:
		fmha_error_set(&base->error, FMHA_ENOMEM, "injected: out of memory");
		device_launch_done(&cpu->base, base);
		return;
	case FAULT_STICKY:
		fmha_error_set(&base->error, FMHA_EDEVICE, "injected: the device is beyond use");
		device_fail(&cpu->base, &base->error);
		device_launch_done(&cpu->base, base);
		return;
	case FAULT_BLOCK:
		hang(NULL, 0, NULL);
	}
	if (!cpu_launch_prepare(launch)) {
		device_launch_done(&cpu->base, base);
		return;
	}
	for (uint32_t i = 0; i < launch->job.n_steps; i++)
		launch->job.steps[i].run = fault == FAULT_HANG   ? hang
					   : fault == FAULT_SEGV ? write_null
								 : die;
	pool_submit(cpu->pool, (struct pool_queue *)(void *)base->stream, &launch->job);
}

static void fake_submit(struct device *device, struct device_launch *base)
{
	struct cpu_device *cpu = fake_device(device);
	uint32_t fault = cpu->fault;

	if (device_has_failed(device, &base->error)) {
		device_launch_done(device, base);
	} else if (fault == FAULT_NONE || cpu->fault_after > 0) {
		if (fault != FAULT_NONE)
			cpu->fault_after--;
		cpu_device_ops.submit(device, base);
	} else {
		cpu->fault = FAULT_NONE;
		submit_faulty(cpu, container_of(base, struct cpu_launch, base), fault);
	}
}

static bool fake_run_here(struct device *device, struct device_launch *base)
{
	return fake_device(device)->fault == FAULT_NONE && cpu_device_ops.run_here(device, base);
}

static int fake_inject(struct device *device, const char *fault, uint32_t after,
		       struct fmha_error *err)
{
	struct cpu_device *cpu = fake_device(device);

	if (!cpu->allow_faults)
		return fmha_error_set(err, FMHA_EPERM,
				      "the configuration does not allow faults on this device");
	for (uint32_t i = 1; i < N_FAULTS; i++) {
		if (strcmp(fault, fault_names[i]) == 0) {
			cpu->fault = i;
			cpu->fault_after = after;
			return 0;
		}
	}
	return fmha_error_set_field(err, FMHA_EINVAL, "fault",
				    "fault %s: not hang, abort, segv, oom, sticky or block", fault);
}

static int fake_open(const struct config_device *config, struct device **ret_device,
		     struct fmha_error *err)
{
	int r = cpu_device_open(config, ret_device, err);

	if (r < 0)
		return r;
	fake_ops = cpu_device_ops;
	fake_ops.backend = "fake";
	fake_ops.submit = fake_submit;
	fake_ops.run_here = fake_run_here;
	fake_ops.inject = fake_inject;
	(*ret_device)->ops = &fake_ops;
	fake_device(*ret_device)->allow_faults = config->allow_faults;
	return 0;
}

const struct device_ops fake_device_ops = {.backend = "fake", .open = fake_open};
