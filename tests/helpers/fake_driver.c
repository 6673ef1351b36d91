/* Stands in for libcuda.so.1, for programs that only look at GPUs. The first file of FAKE_GPUS (paths with colons between
 * them) that exists has a line per GPU: 32 hexadecimal digits and its state, "ok", "lost" or "wedged", or is empty.
 * Without any, there is no driver. The first integers of CUDA_VISIBLE_DEVICES choose among the GPUs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct { unsigned char uuid[16]; char state[8]; } all[64];
static int found, shown, order[64], chosen = -1;
static unsigned char memory[1 << 20];

int cuInit(unsigned flags) {
    char *paths = strdup(getenv("FAKE_GPUS") ? getenv("FAKE_GPUS") : ""), *names, digits[33];
    FILE *file = NULL;
    for (char *path = strtok(paths, ":"); path && !file; path = strtok(NULL, ":")) file = fopen(path, "r");
    if (!file) return 999;
    while (found < 64 && fscanf(file, "%32s %7s", digits, all[found].state) == 2) {
        for (int i = 0; i < 16; i++) sscanf(digits + 2 * i, "%2hhx", &all[found].uuid[i]);
        found++;
    }
    if (!found) return 100;
    names = getenv("CUDA_VISIBLE_DEVICES");
    if (!names) for (; shown < found; shown++) order[shown] = shown;
    else for (char *name = strtok(strdup(names), ","); name; name = strtok(NULL, ",")) {
        int index = atoi(name);
        if (index < 0 || index >= found) break;
        order[shown++] = index;
    }
    return 0;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == 100 ? "no CUDA-capable device is detected" : code == 219 ? "GPU is lost" : "unknown error";
    return 0;
}

int cuDeviceGetCount(int *count) { *count = shown; return 0; }
int cuDeviceGet(int *device, int index) { *device = order[index]; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memcpy(uuid, all[device].uuid, 16); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = all; chosen = device; return 0; }
int cuCtxSetCurrent(void *context) { return context == all ? 0 : 201; }

int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
    if (!strcmp(all[chosen].state, "lost")) return 219;
    while (!strcmp(all[chosen].state, "wedged")) sleep(600);
    *address = (unsigned long long)memory;
    return bytes > sizeof memory ? 2 : 0;
}

int cuMemsetD8_v2(unsigned long long address, unsigned char value, size_t bytes) {
    memset((void *)address, value, bytes);
    return 0;
}

int cuMemcpyDtoH_v2(void *target, unsigned long long address, size_t bytes) {
    memcpy(target, (void *)address, bytes);
    return 0;
}

int cuMemFree_v2(unsigned long long address) { return address == (unsigned long long)memory ? 0 : 1; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device == chosen ? 0 : 1; }
