/* SPDX-License-Identifier: MIT */
#include "roof.h"

#include <cjson/cJSON.h>

static void configure(double *rate, uint32_t configured, bool *ret_configured)
{
	if (configured == 0)
		return;
	*rate = configured * 1e9;
	*ret_configured = true;
}

void roof_init(struct roof *roof, const struct config_device *config,
	       const struct device_info *info)
{
	*roof = (struct roof){.peak = info->peak};
	configure(&roof->peak.f32, config->roof_gflops_f32, &roof->configured_flops);
	configure(&roof->peak.f16, config->roof_gflops_f16, &roof->configured_flops);
	configure(&roof->peak.fp8, config->roof_gflops_fp8, &roof->configured_flops);
	configure(&roof->peak.bytes, config->roof_gbs, &roof->configured_bytes);
}

static double rate_of(const struct device_peak *peak, uint32_t dtype)
{
	switch (dtype) {
	case ABI_F32:
		return peak->f32;
	case ABI_F16:
	case ABI_BF16:
		return peak->f16;
	default:
		return peak->fp8;
	}
}

double roof_ns(const struct roof *roof, const struct plan *plan)
{
	const struct plan_stage *stage = plan_main_stage(plan);
	double rate = stage ? rate_of(&roof->peak, stage->dtype) : 0;
	double by_flops = rate > 0 ? plan->flops / rate : 0;
	double by_bytes = stage && roof->peak.bytes > 0 ? (double)plan->bytes / roof->peak.bytes
							: 0;

	return 1e9 * (by_flops > by_bytes ? by_flops : by_bytes);
}

static void add_rate(cJSON *object, const char *name, double rate, double unit)
{
	if (rate > 0)
		cJSON_AddNumberToObject(object, name, rate / unit);
}

cJSON *roof_json(const struct roof *roof)
{
	cJSON *root = cJSON_CreateObject(), *flops, *source;

	add_rate(root, "gbs", roof->peak.bytes, 1e9);
	flops = cJSON_AddObjectToObject(root, "tflops");
	add_rate(flops, "f32", roof->peak.f32, 1e12);
	add_rate(flops, "f16", roof->peak.f16, 1e12);
	add_rate(flops, "fp8", roof->peak.fp8, 1e12);
	source = cJSON_AddObjectToObject(root, "source");
	cJSON_AddStringToObject(source, "gbs", roof->configured_bytes ? "configured" : "device");
	cJSON_AddStringToObject(source, "tflops", roof->configured_flops ? "configured" : "device");
	return root;
}
