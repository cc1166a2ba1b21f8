/* Makes the n-th system call of one kind fail once, if it touches a path below a given folder.

   Compile with `cc -shared -fPIC -O2 -o failing_calls.so failing_calls.c -ldl -lpthread` and load it with LD_PRELOAD.
   The library does nothing until `failing_calls_arm` is called, which the process does through ctypes; a forked child inherits it.
   Calls are counted by kind, also while none is to fail, but only those on paths, or on descriptors of files, below the
   folder: what the interpreter imports is elsewhere. Glibc's own calls (fopen, opendir's open) don't pass through here,
   so opendir is a kind of its own. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN, READ, WRITE, FSYNC, RENAME, MKDIR, MMAP, UNLINK, TRUNCATE, CLOSE, LIST, STAT, KINDS };
enum { SHORT = -1 }; /* in place of an errno: only half of the bytes are read or written */

static char folder[PATH_MAX];
static atomic_int counts[KINDS];
static int armed_kind = KINDS, armed_number, armed_error;
static char failed_path[PATH_MAX];

/* Count from 0 the calls below `below`; let call `number` (from 1) of `kind` fail with `error`; 0 lets none fail. */
void failing_calls_arm(const char *below, int kind, int number, int error) {
    for (int k = 0; k < KINDS; k++) atomic_store(&counts[k], 0);
    failed_path[0] = 0;
    snprintf(folder, sizeof folder, "%s", below);
    armed_kind = kind, armed_number = number, armed_error = error;
}

int failing_calls_count(int kind) { return atomic_load(&counts[kind]); }

/* The path of the call that failed; empty if none has. */
const char *failing_calls_path(void) { return failed_path; }

static int is_below(const char *path) {
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || path[length] == 0 || path[length] == ' ');
}

static int path_of_descriptor(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length >= 0;
}

/* Count a call on `path`, relative to the folder `at`, or on the descriptor `at` if there is no path.
   Return the errno (or SHORT) with which it must fail; 0 if it must not. */
static int fault(enum kind kind, int at, const char *path) {
    char whole[2 * PATH_MAX];
    if (!folder[0]) return 0;
    int before = errno;
    if (path && path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        whole[0] = 0;
        if (path && at == AT_FDCWD) {
            if (!getcwd(whole, PATH_MAX)) whole[0] = 0;
        } else {
            path_of_descriptor(at, whole);
        }
        if (path) {
            size_t length = strlen(whole);
            snprintf(whole + length, sizeof whole - length, "/%s", path);
        }
    }
    errno = before;
    if (!is_below(whole)) return 0;
    int number = atomic_fetch_add(&counts[kind], 1) + 1;
    if (kind != (enum kind)armed_kind || number != armed_number) return 0;
    snprintf(failed_path, sizeof failed_path, "%.*s", PATH_MAX - 1, whole);
    return armed_error;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(kind, at, path, value)              \
    do {                                         \
        int error = fault(kind, at, path);       \
        if (error > 0) {                         \
            errno = error;                       \
            return value;                        \
        }                                        \
    } while (0)
#define MODE(flags, last)                                     \
    mode_t mode = 0;                                          \
    if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) { \
        va_list more;                                         \
        va_start(more, last);                                 \
        mode = va_arg(more, mode_t);                          \
        va_end(more);                                         \
    }

int open(const char *path, int flags, ...) {
    MODE(flags, flags)
    FAIL(OPEN, AT_FDCWD, path, -1);
    return REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags, flags)
    FAIL(OPEN, AT_FDCWD, path, -1);
    return REAL(open64)(path, flags, mode);
}
int openat(int at, const char *path, int flags, ...) {
    MODE(flags, flags)
    FAIL(OPEN, at, path, -1);
    return REAL(openat)(at, path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...) {
    MODE(flags, flags)
    FAIL(OPEN, at, path, -1);
    return REAL(openat64)(at, path, flags, mode);
}

/* A short call moves half of the bytes, but at least one: none would mean the end of the file. */
#define MOVE(kind, descriptor, count)                                                 \
    int error = fault(kind, descriptor, NULL);                                        \
    if (error == SHORT && (count) > 1) count /= 2;                                    \
    if (error > 0) {                                                                  \
        errno = error;                                                                \
        return -1;                                                                    \
    }

ssize_t read(int descriptor, void *buffer, size_t count) {
    MOVE(READ, descriptor, count)
    return REAL(read)(descriptor, buffer, count);
}
ssize_t pread(int descriptor, void *buffer, size_t count, off_t offset) {
    MOVE(READ, descriptor, count)
    return REAL(pread)(descriptor, buffer, count, offset);
}
ssize_t pread64(int descriptor, void *buffer, size_t count, off64_t offset) {
    MOVE(READ, descriptor, count)
    return REAL(pread64)(descriptor, buffer, count, offset);
}
ssize_t write(int descriptor, const void *buffer, size_t count) {
    MOVE(WRITE, descriptor, count)
    return REAL(write)(descriptor, buffer, count);
}
ssize_t pwrite(int descriptor, const void *buffer, size_t count, off_t offset) {
    MOVE(WRITE, descriptor, count)
    return REAL(pwrite)(descriptor, buffer, count, offset);
}
ssize_t pwrite64(int descriptor, const void *buffer, size_t count, off64_t offset) {
    MOVE(WRITE, descriptor, count)
    return REAL(pwrite64)(descriptor, buffer, count, offset);
}
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    FAIL(WRITE, descriptor, NULL, -1);
    return REAL(writev)(descriptor, parts, count);
}

int fsync(int descriptor) {
    FAIL(FSYNC, descriptor, NULL, -1);
    return REAL(fsync)(descriptor);
}
int fdatasync(int descriptor) {
    FAIL(FSYNC, descriptor, NULL, -1);
    return REAL(fdatasync)(descriptor);
}
int rename(const char *old, const char *new) {
    FAIL(RENAME, AT_FDCWD, new, -1);
    return REAL(rename)(old, new);
}
int renameat(int old_at, const char *old, int new_at, const char *new) {
    FAIL(RENAME, new_at, new, -1);
    return REAL(renameat)(old_at, old, new_at, new);
}
int mkdir(const char *path, mode_t mode) {
    FAIL(MKDIR, AT_FDCWD, path, -1);
    return REAL(mkdir)(path, mode);
}
int mkdirat(int at, const char *path, mode_t mode) {
    FAIL(MKDIR, at, path, -1);
    return REAL(mkdirat)(at, path, mode);
}
void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    if (descriptor >= 0) FAIL(MMAP, descriptor, NULL, MAP_FAILED);
    return REAL(mmap)(address, length, protection, flags, descriptor, offset);
}
void *mmap64(void *address, size_t length, int protection, int flags, int descriptor, off64_t offset) {
    if (descriptor >= 0) FAIL(MMAP, descriptor, NULL, MAP_FAILED);
    return REAL(mmap64)(address, length, protection, flags, descriptor, offset);
}
int unlink(const char *path) {
    FAIL(UNLINK, AT_FDCWD, path, -1);
    return REAL(unlink)(path);
}
int unlinkat(int at, const char *path, int flags) {
    FAIL(UNLINK, at, path, -1);
    return REAL(unlinkat)(at, path, flags);
}
int rmdir(const char *path) {
    FAIL(UNLINK, AT_FDCWD, path, -1);
    return REAL(rmdir)(path);
}
int ftruncate(int descriptor, off_t length) {
    FAIL(TRUNCATE, descriptor, NULL, -1);
    return REAL(ftruncate)(descriptor, length);
}
int ftruncate64(int descriptor, off64_t length) {
    FAIL(TRUNCATE, descriptor, NULL, -1);
    return REAL(ftruncate64)(descriptor, length);
}
int truncate(const char *path, off_t length) {
    FAIL(TRUNCATE, AT_FDCWD, path, -1);
    return REAL(truncate)(path, length);
}
int truncate64(const char *path, off64_t length) {
    FAIL(TRUNCATE, AT_FDCWD, path, -1);
    return REAL(truncate64)(path, length);
}
/* Linux closes the descriptor even if close fails, for example because a network mount could not write its last bytes. */
int close(int descriptor) {
    int error = fault(CLOSE, descriptor, NULL);
    int result = REAL(close)(descriptor);
    if (error > 0 && !result) {
        errno = error;
        return -1;
    }
    return result;
}
DIR *opendir(const char *path) {
    FAIL(LIST, AT_FDCWD, path, NULL);
    return REAL(opendir)(path);
}
DIR *fdopendir(int descriptor) {
    FAIL(LIST, descriptor, NULL, NULL);
    return REAL(fdopendir)(descriptor);
}
int stat(const char *path, struct stat *facts) {
    FAIL(STAT, AT_FDCWD, path, -1);
    return REAL(stat)(path, facts);
}
int stat64(const char *path, struct stat64 *facts) {
    FAIL(STAT, AT_FDCWD, path, -1);
    return REAL(stat64)(path, facts);
}
int lstat(const char *path, struct stat *facts) {
    FAIL(STAT, AT_FDCWD, path, -1);
    return REAL(lstat)(path, facts);
}
int lstat64(const char *path, struct stat64 *facts) {
    FAIL(STAT, AT_FDCWD, path, -1);
    return REAL(lstat64)(path, facts);
}
