/* SPDX-License-Identifier: MIT */
/* limits.h: what one frame may cost its receiver. PROTOCOL.md section 2 explains them. */
#ifndef PROTO_LIMITS_H
#define PROTO_LIMITS_H

#define PROTO_MAX_FRAME              65536 /* bytes, header included */
#define PROTO_MAX_FRAME_BEFORE_HELLO 4096
#define PROTO_MAX_DEPTH              16    /* the message's own array is depth 1 */
#define PROTO_MAX_NODES              4096  /* every value, key and container counts as one */
#define PROTO_MAX_STRING             4096  /* bytes of one str */
#define PROTO_MAX_BIN                32768 /* bytes of one bin */
#define PROTO_MAX_FDS                4     /* file descriptors with one frame */

#endif
