/* SPDX-License-Identifier: MIT */
/*
 * cpu_level.c: the names of the CPU levels and which of them this machine offers.
 *
 * A level needs three consents: the processor has the instructions (CPUID), the operating system
 * saves their registers (XCR0), and for AMX the kernel lets this process use the tiles
 * (arch_prctl).
 */
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <kernels/cpu_level.h>

static const char *const level_names[CPU_N_LEVELS] = {
	[CPU_PORTABLE] = "portable",     [CPU_X86_64_V3] = "x86_64_v3",
	[CPU_X86_64_V4] = "x86_64_v4",   [CPU_X86_64_V4_BF16] = "x86_64_v4_bf16",
	[CPU_X86_64_AMX] = "x86_64_amx",
};

const char *cpu_level_name(enum cpu_level level)
{
	return (unsigned int)level < CPU_N_LEVELS ? level_names[level] : "unknown";
}

int cpu_level_from_name(const char *name, enum cpu_level *ret_level)
{
	for (int i = 0; i < CPU_N_LEVELS; i++) {
		if (strcmp(name, level_names[i]) == 0) {
			*ret_level = (enum cpu_level)i;
			return 0;
		}
	}
	return -1;
}

#ifdef __x86_64__
#include <cpuid.h>

struct cpuid_leaf {
	unsigned int eax, ebx, ecx, edx;
};

static struct cpuid_leaf cpuid_read(unsigned int leaf, unsigned int subleaf)
{
	struct cpuid_leaf r = {0};

	__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
	return r;
}

/* The register states that the operating system saves; 0 without XSAVE. */
static uint64_t xcr0_read(void)
{
	uint32_t low, high;

	if (!(cpuid_read(1, 0).ecx & bit_OSXSAVE))
		return 0;
	__asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
	return (uint64_t)high << 32 | low;
}

static int has_all(unsigned int word, unsigned int bits)
{
	return (word & bits) == bits;
}

/* CPUID bits that gcc 12's or clang 14's cpuid.h may not name. */
#define LEAF7_1_EAX_AVX512_BF16 (1u << 5)
#define LEAF7_EDX_AMX_BF16      (1u << 22)
#define LEAF7_EDX_AMX_TILE      (1u << 24)

#define XCR0_SSE_AVX   0x6u
#define XCR0_AVX512    0xe6u    /* SSE, AVX, opmask, upper halves, upper registers */
#define XCR0_AMX       0x60000u /* tile configuration and data */
#define XFEATURE_TILE  18
#define REQ_XCOMP_PERM 0x1023 /* arch_prctl: let this process use a large register state */

enum cpu_level cpu_level_detect(void)
{
	struct cpuid_leaf leaf1 = cpuid_read(1, 0), leaf7 = cpuid_read(7, 0);
	struct cpuid_leaf leaf7_1 = leaf7.eax >= 1 ? cpuid_read(7, 1) : (struct cpuid_leaf){0};
	uint64_t xcr0 = xcr0_read();

	if (!has_all(leaf1.ecx, bit_AVX | bit_FMA | bit_F16C) || !has_all(leaf7.ebx, bit_AVX2) ||
	    (xcr0 & XCR0_SSE_AVX) != XCR0_SSE_AVX)
		return CPU_PORTABLE;
	if (!has_all(leaf7.ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL) ||
	    (xcr0 & XCR0_AVX512) != XCR0_AVX512)
		return CPU_X86_64_V3;
	if (!has_all(leaf7_1.eax, LEAF7_1_EAX_AVX512_BF16))
		return CPU_X86_64_V4;
	if (!has_all(leaf7.edx, LEAF7_EDX_AMX_TILE | LEAF7_EDX_AMX_BF16) ||
	    (xcr0 & XCR0_AMX) != XCR0_AMX ||
	    syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XFEATURE_TILE) != 0)
		return CPU_X86_64_V4_BF16;
	return CPU_X86_64_AMX;
}
#else
enum cpu_level cpu_level_detect(void)
{
	return CPU_PORTABLE;
}
#endif

const char *cpu_build_compiler(void)
{
	return __VERSION__;
}

const char *cpu_build_sources(void)
{
	return CPU_SOURCES_DIGEST;
}
