/* SPDX-License-Identifier: MIT */
#include <base/loop.h>

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

int loop_init(uv_loop_t *loop)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC) < 0)
		return uv_translate_sys_error(errno);
	(void)close(ends[0]);
	(void)close(ends[1]);
	return uv_loop_init(loop);
}
