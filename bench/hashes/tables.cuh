// Words of the textbook hashes and ciphers beside this, each of which asks for those that it needs.
// They are compiled to PTX by bench/ptx_score.py and never run: code as hashes have it, no more.
typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned char u8;
#define ROL(x, n) (((x) << (n)) | ((x) >> (32 - (n))))
#define ROR(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
#define ROL64(x, n) (((x) << (n)) | ((x) >> (64 - (n))))
#define ROR64(x, n) (((x) >> (n)) | ((x) << (64 - (n))))
#ifdef W256
__device__ __constant__ u32 K256[64] = {
    0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u,
    0xab1c5ed5u, 0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu,
    0x9bdc06a7u, 0xc19bf174u, 0xe49b69c1u, 0xefbe4786u, 0xfc19dc6u,  0x240ca1ccu, 0x2de92c6fu,
    0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau, 0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u,
    0xc6e00bf3u, 0xd5a79147u, 0x6ca6351u,  0x14292967u, 0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu,
    0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u, 0xa2bfe8a1u, 0xa81a664bu,
    0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u, 0x19a4c116u,
    0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
    0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u,
    0xc67178f2u};
#endif
#ifdef W512
__device__ __constant__ u64 K512[80] = {
    0x428a2f98d728ae22ull, 0x7137449123ef65cdull, 0xb5c0fbcfec4d3b2full, 0xe9b5dba58189dbbcull,
    0x3956c25bf348b538ull, 0x59f111f1b605d019ull, 0x923f82a4af194f9bull, 0xab1c5ed5da6d8118ull,
    0xd807aa98a3030242ull, 0x12835b0145706fbeull, 0x243185be4ee4b28cull, 0x550c7dc3d5ffb4e2ull,
    0x72be5d74f27b896full, 0x80deb1fe3b1696b1ull, 0x9bdc06a725c71235ull, 0xc19bf174cf692694ull,
    0xe49b69c19ef14ad2ull, 0xefbe4786384f25e3ull, 0xfc19dc68b8cd5b5ull,  0x240ca1cc77ac9c65ull,
    0x2de92c6f592b0275ull, 0x4a7484aa6ea6e483ull, 0x5cb0a9dcbd41fbd4ull, 0x76f988da831153b5ull,
    0x983e5152ee66dfabull, 0xa831c66d2db43210ull, 0xb00327c898fb213full, 0xbf597fc7beef0ee4ull,
    0xc6e00bf33da88fc2ull, 0xd5a79147930aa725ull, 0x6ca6351e003826full,  0x142929670a0e6e70ull,
    0x27b70a8546d22ffcull, 0x2e1b21385c26c926ull, 0x4d2c6dfc5ac42aedull, 0x53380d139d95b3dfull,
    0x650a73548baf63deull, 0x766a0abb3c77b2a8ull, 0x81c2c92e47edaee6ull, 0x92722c851482353bull,
    0xa2bfe8a14cf10364ull, 0xa81a664bbc423001ull, 0xc24b8b70d0f89791ull, 0xc76c51a30654be30ull,
    0xd192e819d6ef5218ull, 0xd69906245565a910ull, 0xf40e35855771202aull, 0x106aa07032bbd1b8ull,
    0x19a4c116b8d2d0c8ull, 0x1e376c085141ab53ull, 0x2748774cdf8eeb99ull, 0x34b0bcb5e19b48a8ull,
    0x391c0cb3c5c95a63ull, 0x4ed8aa4ae3418acbull, 0x5b9cca4f7763e373ull, 0x682e6ff3d6b2b8a3ull,
    0x748f82ee5defb2fcull, 0x78a5636f43172f60ull, 0x84c87814a1f0ab72ull, 0x8cc702081a6439ecull,
    0x90befffa23631e28ull, 0xa4506cebde82bde9ull, 0xbef9a3f7b2c67915ull, 0xc67178f2e372532bull,
    0xca273eceea26619cull, 0xd186b8c721c0c207ull, 0xeada7dd6cde0eb1eull, 0xf57d4f7fee6ed178ull,
    0x6f067aa72176fbaull,  0xa637dc5a2c898a6ull,  0x113f9804bef90daeull, 0x1b710b35131c471bull,
    0x28db77f523047d84ull, 0x32caab7b40c72493ull, 0x3c9ebe0a15c9bebcull, 0x431d67c49c100d4cull,
    0x4cc5d4becb3e42b6ull, 0x597f299cfc657e2aull, 0x5fcb6fab3ad6faecull, 0x6c44198c4a475817ull};
#endif
#ifdef WMD5
__device__ __constant__ u32 KMD5[64] = {
    0xd76aa478u, 0xe8c7b756u, 0x242070dbu, 0xc1bdceeeu, 0xf57c0fafu, 0x4787c62au, 0xa8304613u,
    0xfd469501u, 0x698098d8u, 0x8b44f7afu, 0xffff5bb1u, 0x895cd7beu, 0x6b901122u, 0xfd987193u,
    0xa679438eu, 0x49b40821u, 0xf61e2562u, 0xc040b340u, 0x265e5a51u, 0xe9b6c7aau, 0xd62f105du,
    0x2441453u,  0xd8a1e681u, 0xe7d3fbc8u, 0x21e1cde6u, 0xc33707d6u, 0xf4d50d87u, 0x455a14edu,
    0xa9e3e905u, 0xfcefa3f8u, 0x676f02d9u, 0x8d2a4c8au, 0xfffa3942u, 0x8771f681u, 0x6d9d6122u,
    0xfde5380cu, 0xa4beea44u, 0x4bdecfa9u, 0xf6bb4b60u, 0xbebfbc70u, 0x289b7ec6u, 0xeaa127fau,
    0xd4ef3085u, 0x4881d05u,  0xd9d4d039u, 0xe6db99e5u, 0x1fa27cf8u, 0xc4ac5665u, 0xf4292244u,
    0x432aff97u, 0xab9423a7u, 0xfc93a039u, 0x655b59c3u, 0x8f0ccc92u, 0xffeff47du, 0x85845dd1u,
    0x6fa87e4fu, 0xfe2ce6e0u, 0xa3014314u, 0x4e0811a1u, 0xf7537e82u, 0xbd3af235u, 0x2ad7d2bbu,
    0xeb86d391u};
#endif
#ifdef WKEC
__device__ __constant__ u64 RC[24] = {0x1ull,
                                      0x8082ull,
                                      0x800000000000808aull,
                                      0x8000000080008000ull,
                                      0x808bull,
                                      0x80000001ull,
                                      0x8000000080008081ull,
                                      0x8000000000008009ull,
                                      0x8aull,
                                      0x88ull,
                                      0x80008009ull,
                                      0x8000000aull,
                                      0x8000808bull,
                                      0x800000000000008bull,
                                      0x8000000000008089ull,
                                      0x8000000000008003ull,
                                      0x8000000000008002ull,
                                      0x8000000000000080ull,
                                      0x800aull,
                                      0x800000008000000aull,
                                      0x8000000080008081ull,
                                      0x8000000000008080ull,
                                      0x80000001ull,
                                      0x8000000080008008ull};
#endif
#ifdef WAES
__device__ __constant__ u32 T0[256] = {
    0xa56363c6u, 0x847c7cf8u, 0x997777eeu, 0x8d7b7bf6u, 0xdf2f2ffu,  0xbd6b6bd6u, 0xb16f6fdeu,
    0x54c5c591u, 0x50303060u, 0x3010102u,  0xa96767ceu, 0x7d2b2b56u, 0x19fefee7u, 0x62d7d7b5u,
    0xe6abab4du, 0x9a7676ecu, 0x45caca8fu, 0x9d82821fu, 0x40c9c989u, 0x877d7dfau, 0x15fafaefu,
    0xeb5959b2u, 0xc947478eu, 0xbf0f0fbu,  0xecadad41u, 0x67d4d4b3u, 0xfda2a25fu, 0xeaafaf45u,
    0xbf9c9c23u, 0xf7a4a453u, 0x967272e4u, 0x5bc0c09bu, 0xc2b7b775u, 0x1cfdfde1u, 0xae93933du,
    0x6a26264cu, 0x5a36366cu, 0x413f3f7eu, 0x2f7f7f5u,  0x4fcccc83u, 0x5c343468u, 0xf4a5a551u,
    0x34e5e5d1u, 0x8f1f1f9u,  0x937171e2u, 0x73d8d8abu, 0x53313162u, 0x3f15152au, 0xc040408u,
    0x52c7c795u, 0x65232346u, 0x5ec3c39du, 0x28181830u, 0xa1969637u, 0xf05050au,  0xb59a9a2fu,
    0x907070eu,  0x36121224u, 0x9b80801bu, 0x3de2e2dfu, 0x26ebebcdu, 0x6927274eu, 0xcdb2b27fu,
    0x9f7575eau, 0x1b090912u, 0x9e83831du, 0x742c2c58u, 0x2e1a1a34u, 0x2d1b1b36u, 0xb26e6edcu,
    0xee5a5ab4u, 0xfba0a05bu, 0xf65252a4u, 0x4d3b3b76u, 0x61d6d6b7u, 0xceb3b37du, 0x7b292952u,
    0x3ee3e3ddu, 0x712f2f5eu, 0x97848413u, 0xf55353a6u, 0x68d1d1b9u, 0x0u,        0x2cededc1u,
    0x60202040u, 0x1ffcfce3u, 0xc8b1b179u, 0xed5b5bb6u, 0xbe6a6ad4u, 0x46cbcb8du, 0xd9bebe67u,
    0x4b393972u, 0xde4a4a94u, 0xd44c4c98u, 0xe85858b0u, 0x4acfcf85u, 0x6bd0d0bbu, 0x2aefefc5u,
    0xe5aaaa4fu, 0x16fbfbedu, 0xc5434386u, 0xd74d4d9au, 0x55333366u, 0x94858511u, 0xcf45458au,
    0x10f9f9e9u, 0x6020204u,  0x817f7ffeu, 0xf05050a0u, 0x443c3c78u, 0xba9f9f25u, 0xe3a8a84bu,
    0xf35151a2u, 0xfea3a35du, 0xc0404080u, 0x8a8f8f05u, 0xad92923fu, 0xbc9d9d21u, 0x48383870u,
    0x4f5f5f1u,  0xdfbcbc63u, 0xc1b6b677u, 0x75dadaafu, 0x63212142u, 0x30101020u, 0x1affffe5u,
    0xef3f3fdu,  0x6dd2d2bfu, 0x4ccdcd81u, 0x140c0c18u, 0x35131326u, 0x2fececc3u, 0xe15f5fbeu,
    0xa2979735u, 0xcc444488u, 0x3917172eu, 0x57c4c493u, 0xf2a7a755u, 0x827e7efcu, 0x473d3d7au,
    0xac6464c8u, 0xe75d5dbau, 0x2b191932u, 0x957373e6u, 0xa06060c0u, 0x98818119u, 0xd14f4f9eu,
    0x7fdcdca3u, 0x66222244u, 0x7e2a2a54u, 0xab90903bu, 0x8388880bu, 0xca46468cu, 0x29eeeec7u,
    0xd3b8b86bu, 0x3c141428u, 0x79dedea7u, 0xe25e5ebcu, 0x1d0b0b16u, 0x76dbdbadu, 0x3be0e0dbu,
    0x56323264u, 0x4e3a3a74u, 0x1e0a0a14u, 0xdb494992u, 0xa06060cu,  0x6c242448u, 0xe45c5cb8u,
    0x5dc2c29fu, 0x6ed3d3bdu, 0xefacac43u, 0xa66262c4u, 0xa8919139u, 0xa4959531u, 0x37e4e4d3u,
    0x8b7979f2u, 0x32e7e7d5u, 0x43c8c88bu, 0x5937376eu, 0xb76d6ddau, 0x8c8d8d01u, 0x64d5d5b1u,
    0xd24e4e9cu, 0xe0a9a949u, 0xb46c6cd8u, 0xfa5656acu, 0x7f4f4f3u,  0x25eaeacfu, 0xaf6565cau,
    0x8e7a7af4u, 0xe9aeae47u, 0x18080810u, 0xd5baba6fu, 0x887878f0u, 0x6f25254au, 0x722e2e5cu,
    0x241c1c38u, 0xf1a6a657u, 0xc7b4b473u, 0x51c6c697u, 0x23e8e8cbu, 0x7cdddda1u, 0x9c7474e8u,
    0x211f1f3eu, 0xdd4b4b96u, 0xdcbdbd61u, 0x868b8b0du, 0x858a8a0fu, 0x907070e0u, 0x423e3e7cu,
    0xc4b5b571u, 0xaa6666ccu, 0xd8484890u, 0x5030306u,  0x1f6f6f7u,  0x120e0e1cu, 0xa36161c2u,
    0x5f35356au, 0xf95757aeu, 0xd0b9b969u, 0x91868617u, 0x58c1c199u, 0x271d1d3au, 0xb99e9e27u,
    0x38e1e1d9u, 0x13f8f8ebu, 0xb398982bu, 0x33111122u, 0xbb6969d2u, 0x70d9d9a9u, 0x898e8e07u,
    0xa7949433u, 0xb69b9b2du, 0x221e1e3cu, 0x92878715u, 0x20e9e9c9u, 0x49cece87u, 0xff5555aau,
    0x78282850u, 0x7adfdfa5u, 0x8f8c8c03u, 0xf8a1a159u, 0x80898909u, 0x170d0d1au, 0xdabfbf65u,
    0x31e6e6d7u, 0xc6424284u, 0xb86868d0u, 0xc3414182u, 0xb0999929u, 0x772d2d5au, 0x110f0f1eu,
    0xcbb0b07bu, 0xfc5454a8u, 0xd6bbbb6du, 0x3a16162cu};
__device__ __constant__ u8 SB[256] = {
    99,  124, 119, 123, 242, 107, 111, 197, 48,  1,   103, 43,  254, 215, 171, 118, 202, 130, 201,
    125, 250, 89,  71,  240, 173, 212, 162, 175, 156, 164, 114, 192, 183, 253, 147, 38,  54,  63,
    247, 204, 52,  165, 229, 241, 113, 216, 49,  21,  4,   199, 35,  195, 24,  150, 5,   154, 7,
    18,  128, 226, 235, 39,  178, 117, 9,   131, 44,  26,  27,  110, 90,  160, 82,  59,  214, 179,
    41,  227, 47,  132, 83,  209, 0,   237, 32,  252, 177, 91,  106, 203, 190, 57,  74,  76,  88,
    207, 208, 239, 170, 251, 67,  77,  51,  133, 69,  249, 2,   127, 80,  60,  159, 168, 81,  163,
    64,  143, 146, 157, 56,  245, 188, 182, 218, 33,  16,  255, 243, 210, 205, 12,  19,  236, 95,
    151, 68,  23,  196, 167, 126, 61,  100, 93,  25,  115, 96,  129, 79,  220, 34,  42,  144, 136,
    70,  238, 184, 20,  222, 94,  11,  219, 224, 50,  58,  10,  73,  6,   36,  92,  194, 211, 172,
    98,  145, 149, 228, 121, 231, 200, 55,  109, 141, 213, 78,  169, 108, 86,  244, 234, 101, 122,
    174, 8,   186, 120, 37,  46,  28,  166, 180, 198, 232, 221, 116, 31,  75,  189, 139, 138, 112,
    62,  181, 102, 72,  3,   246, 14,  97,  53,  87,  185, 134, 193, 29,  158, 225, 248, 152, 17,
    105, 217, 142, 148, 155, 30,  135, 233, 206, 85,  40,  223, 140, 161, 137, 13,  191, 230, 66,
    104, 65,  153, 45,  15,  176, 84,  187, 22};
#endif
#ifdef WPI
__device__ __constant__ u32 PIC[16] = {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x3707344u,
                                       0xa4093822u, 0x299f31d0u, 0x82efa98u,  0xec4e6c89u,
                                       0x452821e6u, 0x38d01377u, 0xbe5466cfu, 0x34e90c6cu,
                                       0xc0ac29b7u, 0xc97c50ddu, 0x3f84d5b5u, 0xb5470917u};
#endif
#ifdef WBLAKE
static __device__ constexpr u8 SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
static __device__ constexpr u8 MIX[8][4] = {{0, 4, 8, 12},  {1, 5, 9, 13},  {2, 6, 10, 14},
                                            {3, 7, 11, 15}, {0, 5, 10, 15}, {1, 6, 11, 12},
                                            {2, 7, 8, 13},  {3, 4, 9, 14}};
#endif
