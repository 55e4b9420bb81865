// The few CoreFoundation types that metal-cpp names; Apple's SDK is not needed to check a build.
#pragma once
#include <TargetConditionals.h>
#include <stddef.h>
#include <stdint.h>

typedef double CFAbsoluteTime;
typedef double CFTimeInterval;
typedef long CFIndex;
typedef unsigned long CFTypeID;
typedef const void* CFTypeRef;
typedef const struct __CFString* CFStringRef;

extern "C" CFStringRef __CFStringMakeConstantString(const char*);
#define CFSTR(text) __CFStringMakeConstantString(text)
