/* Contexts of the script.
 *
 *   create v1|v2|v3|v4|bypass C DEVICE  cuCtxCreate, …; the slot of CTX_CREATE_BYPASS
 *   destroy C                           cuCtxDestroy_v2
 *   retain C DEVICE                     cuDevicePrimaryCtxRetain; release DEVICE; reset DEVICE
 *   enumerate DEVICE                    slot 2 of CUDART_INTERFACE, as runtimes do
 *   green G DEVICE                      cuGreenCtxCreate; green-context C G; green-destroy G
 *   devices                             answers how many
 */
#include "program.h"

#include <stdlib.h>
#include <string.h>

static int made(const char *name, void *out, long result, const char *what, struct answer *answer)
{
	if ((int)result)
		return fail(answer, what, (int)result);
	set(name, out);
	return told(answer, out);
}

static int done(const char *by, void *of, struct answer *answer)
{
	int result = (int)function(by)(of, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
	return result ? fail(answer, by, result) : told(answer, 0);
}

int context_command(int count, char **words, struct answer *answer)
{
	const char *what = words[0];
	void *device = count > 1 ? (void *)atol(words[count - 1]) : 0, *out = 0;
	if (!strcmp(what, "create") && count == 4) {
		const char *form = words[1];
		long result = -2;
		if (!strcmp(form, "v1"))
			result = function("cuCtxCreate")(&out, 0, device, 0, 0, 0, 0, 0, 0, 0, 0);
		else if (!strcmp(form, "v2"))
			result = function("cuCtxCreate_v2")(&out, 0, device, 0, 0, 0, 0, 0, 0, 0, 0);
		else if (!strcmp(form, "v3"))
			result = function("cuCtxCreate_v3")(&out, 0, 0, 0, device, 0, 0, 0, 0, 0, 0);
		else if (!strcmp(form, "v4"))
			result = function("cuCtxCreate_v4")(&out, 0, 0, device, 0, 0, 0, 0, 0, 0, 0);
		else if (!strcmp(form, "bypass"))
			result = function("CTX_CREATE_BYPASS[1]")(&out, 0, device, 0, 0, 0, 0, 0, 0, 0, 0);
		return made(words[2], out, result, form, answer);
	}
	if (!strcmp(what, "retain") && count == 3)
		return made(words[1], out,
		            function("cuDevicePrimaryCtxRetain")(&out, device, 0, 0, 0, 0, 0, 0, 0, 0, 0), what,
		            answer);
	if (!strcmp(what, "enumerate") && count == 2)
		return made("enumerated", out,
		            function("CUDART_INTERFACE[2]")(&out, device, 0, 0, 0, 0, 0, 0, 0, 0, 0), what,
		            answer);
	if (!strcmp(what, "green") && count == 3) {
		char resource[144], description[8] = {0};
		function("cuDeviceGetDevResource")(device, resource, (void *)1, 0, 0, 0, 0, 0, 0, 0, 0);
		void *told_of = description;
		function("cuDevResourceGenerateDesc")(&told_of, resource, (void *)1, 0, 0, 0, 0, 0, 0, 0, 0);
		return made(words[1], out,
		            function("cuGreenCtxCreate")(&out, told_of, device, (void *)1, 0, 0, 0, 0, 0, 0, 0),
		            what, answer);
	}
	if (!strcmp(what, "green-context") && count == 3)
		return made(words[1], out,
		            function("cuCtxFromGreenCtx")(&out, value_of(words[2]), 0, 0, 0, 0, 0, 0, 0, 0, 0),
		            what, answer);
	if (count == 2 && !strcmp(what, "destroy"))
		return done("cuCtxDestroy_v2", value_of(words[1]), answer);
	if (count == 2 && !strcmp(what, "green-destroy"))
		return done("cuGreenCtxDestroy", value_of(words[1]), answer);
	if (count == 2 && !strcmp(what, "release"))
		return done("cuDevicePrimaryCtxRelease_v2", device, answer);
	if (count == 2 && !strcmp(what, "reset"))
		return done("cuDevicePrimaryCtxReset_v2", device, answer);
	if (strcmp(what, "devices"))
		return 1;
	int number = 0;
	long result = function("cuDeviceGetCount")(&number, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
	return (int)result ? fail(answer, what, (int)result) : told(answer, (void *)(long)number);
}
