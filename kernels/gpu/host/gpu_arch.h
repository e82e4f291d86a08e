/* SPDX-License-Identifier: MIT */
/*
 * gpu_arch.h: the GPUs that kernels are compiled for, once. An arch that is no more than a smaller
 * or later sibling of another has the figures of its own and the core of that other, and so its
 * kernels. Adding one is adding a line.
 *
 * X(name, vendor, family, core, lanes of a wave, KiB of LDS that a block may take, CUs or SMs of
 * the card that people mean by it, GB/s of that card's memory by its data sheet)
 */
#ifndef FMHA_GPU_ARCH_H
#define FMHA_GPU_ARCH_H

/* NVIDIA's LDS is a block's limit by the programming guide, 1 KiB below the SM's; RDNA's work group
 * takes half of what two CUs share. */
#define GPU_ARCHS(X)                                                                       \
	X(gfx906, amd, vega, SCALAR, 64, 64, 60, 1024)                    /* MI50 */             \
	X(gfx908, amd, cdna, SCALAR, 64, 64, 120, 1229)                   /* MI100 */            \
	X(gfx90a, amd, cdna2, MFMA, 64, 64, 110, 1638)                    /* MI250X, one die */  \
	X(gfx942, amd, cdna3, MFMA, 64, 64, 304, 5300)                    /* MI300X */           \
	X(gfx950, amd, cdna4, MFMA, 64, 160, 256, 8000)                   /* MI355X */           \
	X(gfx1030, amd, rdna2, SCALAR, 32, 64, 80, 512)                  /* RX 6900 XT */       \
	X(gfx1100, amd, rdna3, WMMA11, 32, 64, 96, 960)                  /* RX 7900 XTX */      \
	X(gfx1101, amd, rdna3, WMMA11, 32, 64, 60, 624)                  /* RX 7800 XT */       \
	X(gfx1102, amd, rdna3, WMMA11, 32, 64, 32, 288)                  /* RX 7600 */          \
	X(gfx1103, amd, rdna3, WMMA11, 32, 64, 12, 90)                  /* 780M */             \
	X(gfx1150, amd, rdna35, WMMA11, 32, 64, 16, 120)                 /* 890M */             \
	X(gfx1151, amd, rdna35, WMMA11, 32, 64, 40, 256)                 /* 8060S */            \
	X(gfx1200, amd, rdna4, WMMA12, 32, 64, 32, 322)                  /* RX 9060 XT */       \
	X(gfx1201, amd, rdna4, WMMA12, 32, 64, 64, 645)                  /* RX 9070 XT */       \
	X(sm_80, nvidia, ampere, MMA, 32, 163, 108, 2039)                 /* A100 */             \
	X(sm_86, nvidia, ampere, MMA, 32, 99, 84, 696)                   /* A40 */              \
	X(sm_87, nvidia, ampere, MMA, 32, 163, 16, 205)                  /* Orin */             \
	X(sm_89, nvidia, ada, MMA, 32, 99, 142, 864)                     /* L40S */             \
	X(sm_90a, nvidia, hopper, WGMMA, 32, 227, 132, 4800)              /* H100, H200 */       \
	X(sm_100a, nvidia, blackwell, MMA, 32, 227, 148, 8000)            /* B200 */             \
	X(sm_103a, nvidia, blackwell, MMA, 32, 227, 148, 8000)            /* B300 */             \
	X(sm_110a, nvidia, blackwell, MMA, 32, 227, 20, 273)             /* Thor */             \
	X(sm_120a, nvidia, blackwell_workstation, MMA, 32, 99, 188, 1792) /* RTX PRO 6000 */     \
	X(sm_121a, nvidia, blackwell_workstation, MMA, 32, 99, 48, 273)  /* GB10 */

#endif
