/* SPDX-License-Identifier: MIT */
/*
 * hip_calls.h: the HIP calls that this folder uses, so that it needs neither vendor's headers or libraries to
 * build. hip_on_amd.c hands them to libamdhip64, whichever version there is; hip_on_cuda.c has each done by a
 * call of libcuda, since HIP's driver-style interface is a renamed CUDA driver interface. Both libraries are opened
 * at run time; on a machine without, hipInit() is hipErrorNoDevice. Extend the lists below when more are needed.
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
	hipErrorInvalidConfiguration = 9,
	hipErrorNoDevice = 100,
	hipErrorInvalidDevice = 101,
	hipErrorInvalidImage = 200,
	hipErrorInvalidHandle = 400,
	hipErrorNotFound = 500,
	hipErrorNotReady = 600,
	hipErrorIllegalAddress = 700,
	hipErrorLaunchOutOfResources = 701,
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
#define hipEventInterprocess          0x04
#define hipIpcMemLazyEnablePeerAccess 0x01 /* the only flag; of HIP 5 it is 0 */
#define hipStreamWaitValueGte         0x00

hipError_t hipInit(unsigned flags);
hipError_t hipGetDeviceProperties(hipDeviceProp_t *properties, int device);
hipError_t hipIpcOpenMemHandle(void **pointer, hipIpcMemHandle_t handle, unsigned flags);
const char *hipGetErrorName(hipError_t error);
const char *hipGetErrorString(hipError_t error);

/* X(name, that of the call of libcuda that does the same, parameters, arguments). Its addresses are numbers: they go the
 * same way. */
#define HIP_SAME_CALLS(X)                                                                          \
	X(hipGetDeviceCount, "cuDeviceGetCount", (int *count), (count))                            \
	X(hipDriverGetVersion, "cuDriverGetVersion", (int *version), (version))                    \
	X(hipFree, "cuMemFree_v2", (void *pointer), (pointer))                                     \
	X(hipHostRegister, "cuMemHostRegister_v2", (void *pointer, size_t bytes, unsigned flags),  \
	  (pointer, bytes, flags))                                                                 \
	X(hipHostUnregister, "cuMemHostUnregister", (void *pointer), (pointer))                    \
	X(hipMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                              \
	  (hipDeviceptr_t to, void *from, size_t bytes, hipStream_t stream),                       \
	  (to, from, bytes, stream))                                                               \
	X(hipMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                              \
	  (void *to, hipDeviceptr_t from, size_t bytes, hipStream_t stream),                       \
	  (to, from, bytes, stream))                                                               \
	X(hipMemsetD8Async, "cuMemsetD8Async",                                                     \
	  (hipDeviceptr_t to, unsigned char value, size_t bytes, hipStream_t stream),              \
	  (to, value, bytes, stream))                                                              \
	X(hipIpcGetMemHandle, "cuIpcGetMemHandle", (hipIpcMemHandle_t * handle, void *pointer),    \
	  (handle, pointer))                                                                       \
	X(hipIpcCloseMemHandle, "cuIpcCloseMemHandle", (void *pointer), (pointer))                 \
	X(hipIpcOpenEventHandle, "cuIpcOpenEventHandle",                                           \
	  (hipEvent_t * event, hipIpcEventHandle_t handle), (event, handle))                       \
	X(hipStreamCreateWithFlags, "cuStreamCreate", (hipStream_t * stream, unsigned flags),      \
	  (stream, flags))                                                                         \
	X(hipStreamDestroy, "cuStreamDestroy_v2", (hipStream_t stream), (stream))                  \
	X(hipStreamSynchronize, "cuStreamSynchronize", (hipStream_t stream), (stream))             \
	X(hipStreamQuery, "cuStreamQuery", (hipStream_t stream), (stream))                         \
	X(hipStreamWaitEvent, "cuStreamWaitEvent",                                                 \
	  (hipStream_t stream, hipEvent_t event, unsigned flags), (stream, event, flags))          \
	X(hipStreamWriteValue32, "cuStreamWriteValue32_v2",                                        \
	  (hipStream_t stream, void *pointer, uint32_t value, unsigned flags),                     \
	  (stream, pointer, value, flags))                                                         \
	X(hipEventCreateWithFlags, "cuEventCreate", (hipEvent_t * event, unsigned flags),          \
	  (event, flags))                                                                          \
	X(hipEventDestroy, "cuEventDestroy_v2", (hipEvent_t event), (event))                       \
	X(hipEventRecord, "cuEventRecord", (hipEvent_t event, hipStream_t stream),                 \
	  (event, stream))                                                                         \
	X(hipEventQuery, "cuEventQuery", (hipEvent_t event), (event))                              \
	X(hipEventElapsedTime, "cuEventElapsedTime",                                               \
	  (float *ms, hipEvent_t start, hipEvent_t stop), (ms, start, stop))                       \
	X(hipModuleLoadData, "cuModuleLoadData", (hipModule_t * module, const void *image),        \
	  (module, image))                                                                         \
	X(hipModuleUnload, "cuModuleUnload", (hipModule_t module), (module))                       \
	X(hipModuleGetFunction, "cuModuleGetFunction",                                             \
	  (hipFunction_t * function, hipModule_t module, const char *name),                        \
	  (function, module, name))

/* Those that libcuda has otherwise. */
#define HIP_OTHER_CALLS(X)                                                                         \
	X(hipSetDevice, "", (int device), (device))                                                \
	X(hipMalloc, "", (void **pointer, size_t bytes), (pointer, bytes))                         \
	X(hipMemGetAddressRange, "",                                                               \
	  (hipDeviceptr_t * base, size_t * bytes, hipDeviceptr_t pointer), (base, bytes, pointer)) \
	X(hipStreamWaitValue32, "",                                                                \
	  (hipStream_t stream, void *pointer, uint32_t value, unsigned flags, uint32_t mask),      \
	  (stream, pointer, value, flags, mask))

/* Those that it has not. */
#define HIP_OWN_CALLS(X)                                                                           \
	X(hipDeviceGetStreamPriorityRange, "", (int *least, int *greatest), (least, greatest))     \
	X(hipStreamCreateWithPriority, "", (hipStream_t * stream, unsigned flags, int priority),   \
	  (stream, flags, priority))                                                               \
	X(hipModuleLaunchKernel, "",                                                               \
	  (hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,              \
	   unsigned block_x, unsigned block_y, unsigned block_z, unsigned lds_bytes,               \
	   hipStream_t stream, void **parameters, void **extra),                                   \
	  (function, grid_x, grid_y, grid_z, block_x, block_y, block_z, lds_bytes, stream,         \
	   parameters, extra))

#define HIP_PROTOTYPE(name, symbol, parameters, arguments) hipError_t name parameters;
HIP_SAME_CALLS(HIP_PROTOTYPE)
HIP_OTHER_CALLS(HIP_PROTOTYPE)
#ifndef FMHA_HIP_ON_CUDA
HIP_OWN_CALLS(HIP_PROTOTYPE)
/* Of the HSA runtime below; NULL: there is none of this name. */
void *hip_lower_symbol(const char *name);
#endif

#endif
