/* SPDX-License-Identifier: MIT */
/* fuzz_seeds DIR: the golden messages' payloads, one a file, for the fuzzers to start from. */
#include <stdio.h>
#include <stdlib.h>

#include <proto/frame.h>

#include "golden.h"

int main(int argc, char **argv)
{
	struct golden goldens[GOLDEN_MAX];
	size_t n = golden_all(goldens);

	if (argc != 2) {
		(void)fprintf(stderr, "usage: fuzz_seeds DIR\n");
		return 2;
	}
	for (size_t i = 0; i < n; i++) {
		const struct proto_buffer *buffer = &goldens[i].frame;
		struct proto_frame frame;
		char path[4096];
		FILE *file;

		(void)proto_frame_parse(buffer->data, buffer->size, PROTO_MAX_FRAME, &frame, NULL);
		(void)snprintf(path, sizeof(path), "%s/%zu", argv[1], i);
		file = fopen(path, "w");
		if (!file ||
		    fwrite(buffer->data + frame.header_bytes, frame.payload_bytes, 1, file) != 1) {
			perror(path);
			return 1;
		}
		(void)fclose(file);
	}
	golden_free(goldens, n);
	return 0;
}
