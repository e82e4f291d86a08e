/* SPDX-License-Identifier: MIT */
/* main.c: the command line of fmhad. */
#include <stdio.h>
#include <string.h>
#include <sysexits.h>

#include <cli/options.h>

#include <base/config.h>
#include <base/log.h>
#include <device/device.h>
#include <worker/main.h>

#include "check.h"
#include "front.h"

struct options {
	struct config_source source;
	bool check, foreground;
};

static const struct cli_option option_table[] = {
	{"config", 'c', "FILE",
	 "configuration (default: " CONFIG_DEFAULT_PATH ", which may be absent)",
	 CLI_TO(TEXT, struct options, source.path)},
	{"socket", 's', "PATH", "socket to listen on, instead of the configuration's",
	 CLI_TO(TEXT, struct options, source.socket)},
	{"foreground", 'f', NULL, "stay in the foreground and log to stderr (it always does)",
	 CLI_TO(FLAG, struct options, foreground)},
	{"verbose", 'v', NULL, "log everything: level debug, whatever the configuration says",
	 CLI_TO(FLAG, struct options, source.verbose)},
	{"check", 0, NULL,
	 "read the configuration, say what is wrong with it or not to be had here, and exit",
	 CLI_TO(FLAG, struct options, check)},
	CLI_END};

static const struct cli_usage usage = {
	.name = "fmhad",
	.brief = "the fused multi-head attention service",
	.synopsis = "[OPTION...]",
	.text = "Serves fused multi-head attention on this machine's devices over a Unix "
		"socket.\n\n"
		"SIGTERM and SIGINT end it after what is in flight, a second one ends it at once; "
		"SIGHUP has it read its configuration again. "
		"Exit status: 0 stopped, 1 failed to start, 64 wrong usage, 78 wrong "
		"configuration.",
	.tables = {option_table},
};

/* Return: -1 to go on, else the exit status. */
static int parse_options(int argc, char **argv, struct options *options)
{
	struct config_source *source = &options->source;

	if (cli_next(&usage, argc, argv, options) != -1) {
		fputs("Try: fmhad --help\n", stderr);
		return EX_USAGE;
	}
	if (optind < argc) {
		fprintf(stderr, "fmhad: unexpected argument: %s\nTry: fmhad --help\n",
			argv[optind]);
		return EX_USAGE;
	}
	if (source->socket && (!*source->socket || strlen(source->socket) >= CONFIG_PATH_BYTES)) {
		fprintf(stderr, "fmhad: --socket %s: must have 1 to %d bytes\n", source->socket,
			CONFIG_PATH_BYTES - 1);
		return EX_USAGE;
	}
	return -1;
}

/* What completion and manual pages are made of when fmhad is built. */
static int document(const char *format)
{
	const struct cli_program program = {.usage = &usage};

	if (strcmp(format, "keys") == 0)
		config_document(stdout);
	else if (!cli_document(&program, format, stdout))
		return EX_USAGE;
	return fflush(stdout) == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
	struct options options = {0};
	struct config config;
	struct fmha_error err;
	int status;

	if (argc == 2 && strcmp(argv[1], "--worker") == 0)
		return worker_main();
	if (argc == 5 && strcmp(argv[1], "--trial") == 0)
		return device_trial(argv[2], argv[3], argv[4]);
	if (argc == 3 && strcmp(argv[1], "--document") == 0)
		return document(argv[2]);
	log_init("fmhad", LOG_LEVEL_INFO);
	status = parse_options(argc, argv, &options);
	if (status >= 0)
		return status;
	if (config_read(&options.source, &config, &err) < 0) {
		log_error("%s", err.msg);
		return EX_CONFIG;
	}
	if (options.check) {
		const char *path = options.source.path ? options.source.path : CONFIG_DEFAULT_PATH;

		return check_configuration(&config, path) < 0 ? EX_CONFIG : 0;
	}
	log_set_level((enum log_level)config.log_level);
	return front_run(&config, &options.source);
}
