/* A boot sector: reads the program behind it to 0x10000 and calls it in 64 bits, with AVX-512's and AMX's registers granted. */
.code16
.globl _start
_start:
    xorw %ax, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movw $0x7c00, %sp
    movb %dl, drive
    movw $14, %cx
more:                           /* 64 sectors at a time */
    pushw %cx
    movb $0x42, %ah
    movb drive, %dl
    movw $request, %si
    int $0x13
    jc stop
    addw $0x800, segment
    addl $64, sector
    popw %cx
    loop more
    cli
    movw $0x1000, %di           /* the first gigabyte where it is, in pages of 2 MB */
    xorl %eax, %eax
    movw $0xc00, %cx
    rep stosl
    movl $0x2003, 0x1000
    movl $0x3003, 0x2000
    movw $0x3000, %di
    movl $0x83, %eax
page:
    movl %eax, (%di)
    addw $8, %di
    addl $0x200000, %eax
    cmpw $0x4000, %di
    jne page
    movl $0x1000, %eax
    movl %eax, %cr3
    movl $0x40620, %eax         /* OSXSAVE, OSXMMEXCPT, OSFXSR, PAE */
    movl %eax, %cr4
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax            /* long mode */
    wrmsr
    movl %cr0, %eax
    andl $~0xc, %eax
    orl $0x80000003, %eax
    movl %eax, %cr0
    lgdt table
    ljmp $8, $long_mode
stop:
    hlt
    jmp stop
.code64
long_mode:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    xorl %ecx, %ecx
    xorl %edx, %edx
    movl $0x600e7, %eax         /* all vectors and tiles */
    xsetbv
    movl $0x3000000, %esp
    movl $0x10000, %eax
    call *%rax
    jmp stop
.align 8
segments: .quad 0, 0x00209a0000000000, 0x0000920000000000
table: .word 23
    .long segments
drive: .byte 0
.align 4
request: .byte 16, 0
    .word 64, 0
segment: .word 0x1000
sector: .long 1, 0
.org 510
.word 0xaa55
