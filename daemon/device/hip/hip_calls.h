/* SPDX-License-Identifier: MIT */
/*
 * hip_calls.h: the HIP calls that this folder uses, so that it needs neither vendor's headers or libraries to
 * build. hip_on_amd.c hands them to libamdhip64, whichever version there is; hip_on_cuda.c has each done by a
 * call of libcuda, since HIP's driver-style interface is a renamed CUDA driver interface. Both libraries are opened
 * at run time; on a machine without, hipInit() is hipErrorNoDevice. Extend the list there when more are needed.
 *
 * Error values are those that HIP and CUDA share.
 */
#ifndef FMHAD_DEVICE_HIP_CALLS_H
#define FMHAD_DEVICE_HIP_CALLS_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
	hipSuccess = 0,
	hipErrorInvalidValue = 1,
	hipErrorOutOfMemory = 2,
	hipErrorNotInitialized = 3,
	hipErrorDeinitialized = 4,
	hipErrorInvalidConfiguration = 9,
	hipErrorNoDevice = 100,
	hipErrorInvalidDevice = 101,
	hipErrorInvalidImage = 200,
	hipErrorInvalidHandle = 400,
	hipErrorNotFound = 500,
	hipErrorNotReady = 600,
	hipErrorIllegalAddress = 700,
	hipErrorLaunchOutOfResources = 701,
	hipErrorLaunchTimeOut = 702,
	hipErrorLaunchFailure = 719,
	hipErrorNotSupported = 801,
	hipErrorUnknown = 999,
} hipError_t;

typedef int hipDevice_t;
typedef void *hipDeviceptr_t;
typedef struct CUstream_st *hipStream_t;
typedef struct CUevent_st *hipEvent_t;
typedef struct CUmod_st *hipModule_t;
typedef struct CUfunc_st *hipFunction_t;

typedef struct {
	char reserved[64];
} hipIpcMemHandle_t;

typedef struct {
	char reserved[64];
} hipIpcEventHandle_t;

/* The members in use of HIP's device properties. */
typedef struct {
	char name[256];
	char gcnArchName[256]; /* "gfx942:sramecc+:xnack-", "sm_90a" */
	size_t totalGlobalMem;
	int multiProcessorCount;
	size_t sharedMemPerBlock; /* NVIDIA: the opt-in limit */
	int warpSize;
	int pciDomainID, pciBusID, pciDeviceID;
	int clockRate, memoryClockRate; /* the highest, kHz */
	int memoryBusWidth;             /* bits; NVIDIA: two a clock */
} hipDeviceProp_t;

#define hipStreamNonBlocking          0x01
#define hipEventDisableTiming         0x02
#define hipEventInterprocess          0x04
#define hipIpcMemLazyEnablePeerAccess 0x01 /* the only flag; of HIP 5 it is 0 */
#define hipStreamWaitValueGte         0x00

hipError_t hipInit(unsigned flags);
hipError_t hipGetDeviceCount(int *count);
hipError_t hipSetDevice(int device);
hipError_t hipGetDeviceProperties(hipDeviceProp_t *properties, int device);
hipError_t hipDriverGetVersion(int *version);
hipError_t hipMemGetInfo(size_t *free_bytes, size_t *total_bytes);
const char *hipGetErrorName(hipError_t error);
const char *hipGetErrorString(hipError_t error);

hipError_t hipMalloc(void **pointer, size_t bytes);
hipError_t hipFree(void *pointer);
hipError_t hipHostRegister(void *pointer, size_t bytes, unsigned flags);
hipError_t hipHostUnregister(void *pointer);
hipError_t hipMemGetAddressRange(hipDeviceptr_t *base, size_t *bytes, hipDeviceptr_t pointer);
hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t to, void *from, size_t bytes, hipStream_t stream);
hipError_t hipMemcpyDtoHAsync(void *to, hipDeviceptr_t from, size_t bytes, hipStream_t stream);
hipError_t hipMemsetD8Async(hipDeviceptr_t to, unsigned char value, size_t bytes,
			    hipStream_t stream);

hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t *handle, void *pointer);
hipError_t hipIpcOpenMemHandle(void **pointer, hipIpcMemHandle_t handle, unsigned flags);
hipError_t hipIpcCloseMemHandle(void *pointer);
hipError_t hipIpcOpenEventHandle(hipEvent_t *event, hipIpcEventHandle_t handle);

hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags);
#ifndef FMHA_HIP_ON_CUDA
hipError_t hipDeviceGetStreamPriorityRange(int *least, int *greatest);
hipError_t hipStreamCreateWithPriority(hipStream_t *stream, unsigned flags, int priority);
#endif
hipError_t hipStreamDestroy(hipStream_t stream);
hipError_t hipStreamSynchronize(hipStream_t stream);
hipError_t hipStreamQuery(hipStream_t stream);
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags);
hipError_t hipStreamWaitValue32(hipStream_t stream, void *pointer, uint32_t value, unsigned flags,
				uint32_t mask);
hipError_t hipStreamWriteValue32(hipStream_t stream, void *pointer, uint32_t value, unsigned flags);

hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags);
hipError_t hipEventDestroy(hipEvent_t event);
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);
hipError_t hipEventQuery(hipEvent_t event);
hipError_t hipEventSynchronize(hipEvent_t event);
hipError_t hipEventElapsedTime(float *ms, hipEvent_t start, hipEvent_t stop);

hipError_t hipModuleLoadData(hipModule_t *module, const void *image);
hipError_t hipModuleUnload(hipModule_t module);
hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name);
#ifndef FMHA_HIP_ON_CUDA
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y,
				 unsigned grid_z, unsigned block_x, unsigned block_y,
				 unsigned block_z, unsigned lds_bytes, hipStream_t stream,
				 void **parameters, void **extra);
/* Of the HSA runtime below; NULL: there is none of this name. */
void *hip_lower_symbol(const char *name);
#endif

#endif
