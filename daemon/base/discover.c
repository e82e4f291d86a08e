/* SPDX-License-Identifier: MIT */
#include <base/discover.h>

#include <limits.h>
#include <stdio.h>
#include <unistd.h>

static uint32_t append(const struct config_device *model, const char *backend, uint32_t index,
		       struct config_device *devices, uint32_t n_devices, uint32_t capacity)
{
	if (n_devices >= capacity)
		return n_devices;
	devices[n_devices] = *model;
	(void)snprintf(devices[n_devices].backend, sizeof(devices[0].backend), "%s", backend);
	devices[n_devices].index = index;
	return n_devices + 1;
}

/* A node of the compute topology is a GPU when its gpu_id is not 0; CPUs are nodes too. */
static bool is_kfd_gpu(const char *sys, uint32_t node, bool *ret_exists)
{
	char path[PATH_MAX];
	unsigned gpu_id = 0;
	FILE *file;

	(void)snprintf(path, sizeof(path), "%s/class/kfd/kfd/topology/nodes/%u/gpu_id", sys, node);
	file = fopen(path, "re");
	*ret_exists = file != NULL;
	if (!file)
		return false;
	if (fscanf(file, "%u", &gpu_id) != 1)
		gpu_id = 0;
	(void)fclose(file);
	return gpu_id != 0;
}

uint32_t discover_gpus(const char *dev, const char *sys, const struct config_device *model,
		       struct config_device *devices, uint32_t n_devices, uint32_t capacity)
{
	char path[PATH_MAX];
	uint32_t n_hip = 0;
	bool exists = true;

	for (uint32_t i = 0; n_devices < capacity; i++) {
		(void)snprintf(path, sizeof(path), "%s/nvidia%u", dev, i);
		if (access(path, F_OK) != 0)
			break;
		n_devices = append(model, "cuda", i, devices, n_devices, capacity);
	}
	for (uint32_t node = 0; exists && n_devices < capacity; node++)
		if (is_kfd_gpu(sys, node, &exists))
			n_devices = append(model, "hip", n_hip++, devices, n_devices, capacity);
	return n_devices;
}
